"""Whether all ranks still have the same parameters and optimizer, bit for bit (floor R).

Nothing in a step tells a replica that went astray (a bit flipped in memory or on its way, a GPU that computes wrong, code
that writes by rank): gradients are averaged over all ranks, and each rank applies them to whatever it holds. Ranks of
one kind of machine do the same arithmetic on the same numbers, so a sum over the bits of each tensor has to be equal.
"""

from __future__ import annotations

import json
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from elasticflow import events
from elasticflow.errors import ReplicasDifferError
from elasticflow.runtime import kind
from elasticflow.runtime.agreement import sums_of
from elasticflow.snapshots.policy import Due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from elasticflow.runtime.member import Worker
    from elasticflow.runtime.order import Position
    from elasticflow.runtime.state import Captured, State
    from elasticflow.runtime.tier import Tier
    from elasticflow.snapshots.policy import Place

Sums = dict[str, int]
"""Of one rank: what the bits of each tensor add up to, by key."""


class Comparison:
    """Compares the replicas of all ranks: at an interval, and before a snapshot is taken. Every rank has one.

    Left out is what a rank may have otherwise than others: buffers, and objects of the job's own.

    Args:
        me: This worker.
        state: Of the job.
        every: "1000 steps"; None: never.
    """

    def __init__(self, me: Worker, state: State, every: str | None) -> None:
        self._me, self._state = me, state
        self._due = None if every is None or me.world_size == 1 else Due((every,))
        self._last: Place | None = None

    def begin(self, position: Position) -> None:
        """Training begins at *position*, with what all ranks loaded or built alike. Collective: every rank.

        Ranks of different kinds may round otherwise: they are not compared, which rank 0 says once.
        """
        self._last = position
        if self._due is None or self._me.is_exact:  # exact mode has refused them
            return
        found = kind.difference(self._me)
        if found is not None:
            self._due = None
            if self._me.rank == 0:
                self._me.event(events.REPLICAS_NOT_COMPARED, reason=f"workers are not of one kind: {found}")

    def due(self, position: Position) -> bool:
        """True if the replicas are to be compared after this step; the same on every rank."""
        return self._due is not None and self._last is not None and self._due.is_due(self._last, position)

    def require_same(self, position: Position, tier: Tier | None) -> None:
        """Return if all replicas are equal after this step, which is asked once. Collective: every rank.

        Args:
            position: After the step.
            tier: Forgets what it holds if they are not: that was never compared.

        Raises:
            ReplicasDifferError: they are not. Only the ranks that it names raise it; the others wait to end with them,
                so that who went astray is who failed.
        """
        me = self._me
        if self._due is None or (self._last is not None and self._last.step == position.step):
            return
        self._last = position
        sums = _sums(self._state.capture())
        number = int(blake2b(repr(sums).encode(), digest_size=7).hexdigest(), 16)
        digest = torch.tensor([number, -number])
        dist.all_reduce(digest, dist.ReduceOp.MAX)
        most, least = digest.tolist()
        if most == -least:
            return
        ranks = [json.loads(text) for text in me.gather_text(json.dumps(sums))]
        if tier is not None:
            tier.forget()
        error = difference(position.step, ranks)
        if me.rank not in error.ranks:
            me.barrier()
        raise error


def flip(model: nn.Module) -> None:
    """Flip a bit of one of the model's numbers, by a hundredth of its value or so; for faults on cue."""
    parameter = next(p.detach() for p in model.parameters() if p.is_contiguous() and p.is_floating_point())
    number = parameter.view(-1)[parameter.numel() // 2 :][:1].view(torch.uint8)
    number[-2:-1].bitwise_xor_(1)


def difference(step: int, ranks: Sequence[Sums]) -> ReplicasDifferError:
    """Return what to say of replicas that are not equal after *step*, and which ranks are astray: a minority, or all."""
    copies = [tuple(sorted(sums.items())) for sums in ranks]
    right, count = Counter(copies).most_common(1)[0]
    has_majority = 2 * count > len(ranks)
    astray = [rank for rank, copy in enumerate(copies) if not has_majority or copy != right]
    usual = dict(right)
    differing = [key for key in ranks[0] if any(sums.get(key) != usual.get(key) for sums in ranks)]
    what = differing[0] if differing else "set of tensors"
    rest = len(differing) - 1
    more = f" (and {rest} more tensor{'s' if rest > 1 else ''})" if rest > 0 else ""
    if has_majority:
        who = f"rank {astray[0]} has" if len(astray) == 1 else f"ranks {_listed(astray)} have"
        text = f"after step {step} {who} another {what}{more} than the {count} other ranks"
    else:
        text = f"after step {step} the ranks {_listed(astray)} have each another {what}{more}: which is right cannot be told"
    return ReplicasDifferError(text, astray)


def _sums(captured: Captured) -> Sums:
    same = captured.tensors.keys() - captured.local
    return sums_of({key: tensor for key, tensor in captured.tensors.items() if key in same})


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
