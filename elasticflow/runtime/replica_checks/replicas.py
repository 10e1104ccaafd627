"""Whether all ranks still have the same parameters and optimizer, bit for bit.

Nothing in a step tells a replica that went astray (a bit flipped in memory or on its way, a GPU that computes wrong, code
that writes by rank): gradients are averaged over all ranks, and each rank applies them to whatever it holds. Ranks of
one kind of machine do the same arithmetic on the same numbers, so a sum over the bits of each tensor has to be equal.
"""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from elasticflow import events
from elasticflow.errors import ReplicasDifferError
from elasticflow.runtime.process import environment
from elasticflow.runtime.replica_checks.checksums import Begun, begin_sums, sums_of, told
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.state.state import Captured, State
    from elasticflow.snapshots.format.policy import HasPosition

Sums = dict[str, int]
"""Of one rank: what the bits of each tensor add up to, by key."""


class HeldStates(Protocol):
    """What is held in memory to go on from (`runtime/snapshot/memory_tier.py`)."""

    def forget(self, equal_at: int) -> None:
        """Have nothing be gone on from that was held, or taken of it, after step *equal_at*."""


@dataclass
class _Asked:
    """A comparison that goes on behind the next step: sums of this rank, and what they are asked for."""

    step: int
    sums: Future[Begun]
    then: Callable[[], None]
    unhook: Callable[[], None]


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
        self._last: HasPosition | None = None
        self._equal_at = 0  # step after which the replicas were last known to be equal
        self._asked: _Asked | None = None
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, position: Position) -> None:
        """Training begins at *position*, with what all ranks loaded or built alike. Collective: every rank.

        Ranks of different kinds may round otherwise: they are not compared, which rank 0 says once.
        """
        self._last, self._equal_at = position, position.step
        if self._due is None or self._me.is_exact:  # exact mode has refused them
            return
        found = environment.difference(self._me)
        if found is not None:
            self._due = None
            if self._me.rank == 0:
                self._me.event(events.REPLICAS_NOT_COMPARED, reason=f"workers are not of one kind: {found}")

    def due(self, position: Position) -> bool:
        """True if the replicas are to be compared after this step; the same on every rank."""
        return self._due is not None and self._last is not None and self._due.is_due(self._last, position)

    def require_same(self, position: Position, tier: HeldStates | None) -> None:
        """Return if all replicas are equal after this step, which is asked once. Collective: every rank.

        Args:
            position: After the step.
            tier: Forgets what it holds if they are not: that was never compared.

        Raises:
            ReplicasDifferError: they are not. Only the ranks that it names raise it; the others wait to end with them,
                so that who went astray is who failed.
        """
        if self._is_done(position):
            return
        self._last = position
        sums = sums_of(self._compared(self._state.capture()))
        if not self._are_equal(sums):
            self._refuse(position.step, sums, tier)
        self._equal_at = position.step

    def ask(self, position: Position, captured: Captured, then: Callable[[], None]) -> None:
        """Have the replicas compared as they are after this step, and *then* called if they are equal. Every rank.

        Nobody is waited for: the sums are made behind the next step, up to the optimizer's part of it, and the ranks'
        are compared by `settle`.
        """
        if self._is_done(position):
            then()
            return
        self._last = position
        tensors = self._compared(captured)
        sums, unhook = self._begin(tensors)
        self._asked = _Asked(position.step, sums, then, unhook)

    def settle(self, tier: HeldStates | None) -> None:
        """Answer what was asked for, if anything was. Collective: every rank, at the same step.

        Raises:
            ReplicasDifferError: as `require_same` does; what was to follow does not.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        asked.unhook()
        if not self._are_equal(told(asked.sums.result())):
            # Code of the job's own may have written behind torch's back while sums were made. Who went astray stays so.
            now = sums_of(self._compared(self._state.capture()))
            if not self._are_equal(now):
                self._refuse(asked.step, now, tier)
        self._equal_at = asked.step
        asked.then()

    def _is_done(self, position: Position) -> bool:
        """Return whether nothing is to be compared after this step, or it was."""
        return self._due is None or (self._last is not None and self._last.step == position.step)

    def _begin(self, tensors: Mapping[str, Tensor]) -> tuple[Future[Begun], Callable[[], None]]:
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            begun: Future[Begun] = (
                Future()
            )  # in the order of the device's stream, so before the optimizer's step
            begun.set_result(begin_sums(tensors))
            return begun, lambda: None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "compare")
        begun = self._thread.submit(begin_sums, tensors)

        def wait(*_: object) -> None:
            begun.result()

        hooks = [each.register_step_pre_hook(wait) for each in self._state.optimizers.values()]

        def unhook() -> None:
            for hook in hooks:
                hook.remove()

        return begun, unhook

    def _compared(self, captured: Captured) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in captured.tensors.items() if key not in captured.local}

    def _are_equal(self, sums: Sums) -> bool:
        number = int(blake2b(repr(sums).encode(), digest_size=7).hexdigest(), 16)
        digest = torch.tensor([number, -number])
        dist.all_reduce(digest, dist.ReduceOp.MAX)
        most, least = digest.tolist()
        return bool(most == -least)

    def _refuse(self, step: int, sums: Sums, tier: HeldStates | None) -> None:
        if tier is not None:
            # Before the ranks hear from each other: whoever ends first leaves nothing that its successors could go on from.
            tier.forget(self._equal_at)
        ranks = [json.loads(text) for text in self._me.gather_text(json.dumps(sums))]
        error = difference(step, ranks)
        if self._me.rank not in error.ranks:
            self._me.barrier()
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


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
