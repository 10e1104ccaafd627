"""Checks that all ranks still have the same parameters and optimizer, bit for bit, and the same state to store: a snapshot holds one.

Nothing in a step shows that a replica has diverged (a bit flipped in memory or on its way, a GPU that computes wrong,
code that writes by rank): gradients are averaged over all ranks, and each rank applies them to its own parameters. Ranks
in equal environments do the same arithmetic on the same numbers, so a sum over the bits of each tensor has to be equal.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from elasticflow import events
from elasticflow.errors import NotExchangedError, RanksDifferError, ReplicasDifferError
from elasticflow.runtime.process import checksums, environment
from elasticflow.runtime.process.process_group import DigestComparison
from elasticflow.runtime.process.sharded_tensors import NOT_SHARDED, local_of
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.sharded_tensors import Box
    from elasticflow.runtime.state.state import Captured, State
    from elasticflow.snapshots.format.policy import HasPosition

Sums = dict[str, int]
"""Sums over the bits of one rank's tensors, by key."""


@dataclass
class _Pending:
    """A comparison that continues during the next step."""

    step: int
    sums: Future[checksums.StartedSums]
    then: Callable[[], None]
    unhook: Callable[[], None]


# Bytes that a core sums up in a millisecond or less.
_SMALL = 4 << 20
NEVER = "never"
"""Value of `train.compare_replicas` that switches every comparison off."""


class ReplicaCheck:
    """Compares the replicas of all ranks after the first step, at an interval, and before each snapshot. Every rank has one.

    Buffers and objects of the job's own are left out: they may differ between ranks.

    Args:
        every: An interval such as "1000 steps"; None: only the first step and snapshots; `NEVER`: no comparison.
        on_divergence: Called before a difference is raised, with the last step after which all replicas were equal:
            states held in memory since then were never compared.
        is_exact: The ranks' environments are known to give the same bits.
        not_exchanged: Names the gradients that the ranks do not exchange, if known; called only if replicas differ.

    Attributes:
        cost_s: Seconds on a core that the last comparison by `start` took: its sums, and the exchange of their digests.
        waited_s: Seconds that it waited for the other ranks, and for the sums of a device.
    """

    def __init__(
        self,
        worker: Worker,
        state: State,
        every: str | None,
        on_divergence: Callable[[int], None] | None = None,
        *,
        is_exact: bool,
        not_exchanged: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._worker, self._state, self._is_exact = worker, state, is_exact
        self._on_divergence, self._not_exchanged = on_divergence, not_exchanged
        self._compares = every != NEVER and worker.world_size > 1
        self._due = Due(()) if every is None or every == NEVER else Due((every,))
        self._is_first = True
        self._last: HasPosition | None = None
        # Step after which the replicas were last known to be equal.
        self._equal_at = 0
        self._pending: _Pending | None = None
        self.cost_s = self.waited_s = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._sums = checksums.Sums({})
        # Sharded tensors are compared between the ranks that hold the same rows.
        self._boxes: Mapping[str, Box] = {}
        self._shards = NOT_SHARDED

    def begin(self, position: Position) -> None:
        """Begin at *position*, where all ranks have loaded or built the same state. Collective: every rank.

        Ranks in different environments may round differently: they are not compared, which rank 0 logs once.
        """
        self._last, self._equal_at = position, position.step
        if not self._compares:
            return
        if (
            self._worker.rank == 0
            and self._state.is_sharded
            and len(self._state.capture().shards.holders) == 1
        ):
            reason = "each worker holds rows of the model that no other worker holds"
            self._worker.event(events.REPLICAS_NOT_COMPARED, reason=reason)
        if self._is_exact:  # exact mode has refused different environments
            return
        different = environment.first_difference(self._worker)
        if different is not None:
            self._compares = False
            if self._worker.rank == 0:
                self._worker.event(
                    events.REPLICAS_NOT_COMPARED, reason=f"workers are not of one kind: {different}"
                )

    def is_due(self, position: Position) -> bool:
        """True if the replicas must be compared after this step; the same on every rank."""
        if not self._compares or self._last is None:
            return False
        return self._is_first or self._due.is_due(self._last, position)

    def require_same(self, position: Position) -> None:
        """Make sure that all replicas are equal after this step. Collective: every rank.

        Each step is compared once at most.

        Raises:
            NotExchangedError: the replicas differ, and the gradients that were not exchanged are known; on every rank.
            ReplicasDifferError: the replicas differ. Only the ranks that the error names raise it; the other ranks wait
                to end with them, so that the launcher tells the diverged ranks by their failure.
        """
        if self._is_done(position):
            return
        self._last = position
        sums = self._sums_now()
        if not self._are_equal(sums):
            self._refuse(position.step, sums)
        self._is_first, self._equal_at = False, position.step

    def start(
        self, position: Position, captured: Captured, then: Callable[[], None], *, soon: bool = False
    ) -> None:
        """Compare the replicas as they are after this step, and call *then* if they are equal. Every rank.

        No rank waits: the sums are computed during the next step, up to its optimizer step, and `finish` compares them
        between the ranks. With *soon*, those of a small state on the CPU are compared at once, which calls *then* a step earlier.

        Raises:
            ReplicasDifferError: as `finish` does, with *soon*.
        """
        self.cost_s = self.waited_s = 0.0
        if self._is_done(position):
            then()
            return
        self._last = position
        is_on_cpu = all(tensor.device.type == "cpu" for tensor in captured.tensors.values())
        is_now = soon and is_on_cpu and _is_small(captured)
        sums, unhook = self._start_sums(captured, in_thread=is_on_cpu and not is_now)
        self._pending = _Pending(position.step, sums, then, unhook)
        if is_now:
            self.finish()

    @property
    def is_pending(self) -> bool:
        """True if a comparison was started and is not finished; the same on every rank."""
        return self._pending is not None

    def finish(self) -> None:
        """Finish the comparison begun by `start`, if any. Collective: every rank, at the same step.

        Raises:
            ReplicasDifferError: as in `require_same`; `then` is not called.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.unhook()
        began, ran = time.monotonic(), time.thread_time()
        is_equal = self._are_equal(pending.sums.result().result())
        ran = time.thread_time() - ran
        self.cost_s += ran
        self.waited_s = time.monotonic() - began - ran
        if not is_equal:
            # The job's own code may have written to tensors while sums were computed, unseen by torch. A diverged replica
            # stays diverged.
            sums = self._sums_now()
            if not self._are_equal(sums):
                self._refuse(pending.step, sums)
        self._equal_at = pending.step
        pending.then()

    def _is_done(self, position: Position) -> bool:
        """True if this step needs no comparison, or has been compared."""
        return not self._compares or (self._last is not None and self._last.step == position.step)

    def _start_sums(
        self, captured: Captured, *, in_thread: bool
    ) -> tuple[Future[checksums.StartedSums], Callable[[], None]]:
        def sum_up() -> checksums.StartedSums:
            began = time.thread_time()
            sums = self._sums_of(captured).start()
            self.cost_s = time.thread_time() - began
            return sums

        if not in_thread:
            # A device's stream computes the sums in order, so before the optimizer's step.
            started: Future[checksums.StartedSums] = Future()
            started.set_result(sum_up())
            # `finish` waits for no more than the sums.
            started.result().fetch()
            return started, lambda: None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "compare")
        started = self._thread.submit(sum_up)

        def wait(*_: object) -> None:
            started.result()

        hooks = [optimizer.register_step_pre_hook(wait) for optimizer in self._state.optimizers.values()]

        def unhook() -> None:
            for hook in hooks:
                hook.remove()

        return started, unhook

    def _sums_now(self) -> Sums:
        return self._sums_of(self._state.capture()).start().result()

    def _sums_of(self, captured: Captured) -> checksums.Sums:
        tensors = {key: tensor for key, tensor in captured.tensors.items() if key not in captured.local}
        self._boxes, self._shards = captured.boxes, captured.shards
        if not self._sums.fits(tensors):
            self._sums = checksums.Sums(tensors)
        return self._sums

    def _are_equal(self, sums: Sums) -> bool:
        whole = {key: number for key, number in sums.items() if key not in self._boxes}
        parts: list[str | None] = [None] * self._shards.degree
        parts[self._shards.shard] = repr({key: number for key, number in sums.items() if key in self._boxes})
        return DigestComparison(repr(whole), *(parts if self._boxes else ())).are_equal()

    def _refuse(self, step: int, sums: Sums) -> None:
        if self._on_divergence is not None:
            # Called before the ranks exchange sums, so that a rank that ends early leaves no diverged state to resume from.
            self._on_divergence(self._equal_at)
        numbers, ranks = self._differing(sums)
        if why := next(filter(None, self._worker.gather_text(self._not_exchanged() or "")), None):
            raise NotExchangedError(step, differing_tensors(ranks), why, is_sharded=bool(self._boxes))
        error = difference(step, ranks, numbers)
        if self._worker.rank not in error.ranks:
            self._worker.barrier()
        raise error

    def _differing(self, sums: Sums) -> tuple[list[int], list[Sums]]:
        """Return ranks of which some differ, and their sums: all ranks, or those that hold the same rows. Collective: every rank."""
        everybody = self._worker.gather_text(json.dumps([self._shards.shard, sums]))
        ranks: list[tuple[int, Sums]] = [json.loads(text) for text in everybody]
        whole = [{k: number for k, number in each.items() if k not in self._boxes} for _, each in ranks]
        if not self._boxes or any(each != whole[0] for each in whole):
            return list(range(len(ranks))), whole
        for shard in range(self._shards.degree):
            numbers = [rank for rank, (its_shard, _) in enumerate(ranks) if its_shard == shard]
            group = [ranks[rank][1] for rank in numbers]
            if any(each != group[0] for each in group):
                return numbers, group
        return list(range(len(ranks))), whole


def _is_small(captured: Captured) -> bool:
    """Return whether sums over the compared tensors take about a millisecond; the same on every rank, since those tensors are alike."""
    if captured.boxes:
        return False
    compared = (tensor for key, tensor in captured.tensors.items() if key not in captured.local)
    return sum(tensor.nbytes for tensor in compared) <= _SMALL


def flip(model: nn.Module) -> None:
    """Flip a bit of one of the model's numbers, which changes it by about a hundredth; for injected faults."""
    parts = (local_of(p.detach()) for p in model.parameters())
    parameter = next(p for p in parts if p.is_contiguous() and p.is_floating_point() and p.numel())
    number = parameter.view(-1)[parameter.numel() // 2 :][:1].view(torch.uint8)
    number[-2:-1].bitwise_xor_(1)


def difference(step: int, ranks: Sequence[Sums], numbers: Sequence[int] | None = None) -> ReplicasDifferError:
    """Return the error that names the tensors that differ after *step*, and the diverged ranks: a minority, or all ranks.

    Args:
        ranks: Sums, in the order of *numbers*.
        numbers: The ranks compared, ascending; None: all ranks, from 0.
    """
    copies = [tuple(sorted(sums.items())) for sums in ranks]
    right, count = Counter(copies).most_common(1)[0]
    has_majority = 2 * count > len(ranks)
    numbers = range(len(ranks)) if numbers is None else numbers
    diverged = [n for n, copy in zip(numbers, copies, strict=True) if not has_majority or copy != right]
    differing = differing_tensors(ranks)
    what = differing[0] if differing else "set of tensors"
    rest = len(differing) - 1
    more = f" (and {rest} more tensor{'s' if rest > 1 else ''})" if rest > 0 else ""
    if has_majority:
        who = f"rank {diverged[0]} has" if len(diverged) == 1 else f"ranks {_listed(diverged)} have"
        text = f"after step {step} {who} another {what}{more} than the {count} other ranks"
    else:
        text = f"after step {step} the ranks {_listed(diverged)} have each another {what}{more}: which is right cannot be told"
    return ReplicasDifferError(text, diverged)


def differing_tensors(ranks: Sequence[Sums]) -> list[str]:
    """Return the keys of the tensors that are not the same on all ranks."""
    usual = dict(Counter(tuple(sorted(sums.items())) for sums in ranks).most_common(1)[0][0])
    return [key for key in ranks[0] if any(sums.get(key) != usual.get(key) for sums in ranks)]


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


_OWN = "include."
_REMEDY = "derive it from what every rank sees, or send every rank the same (torch.distributed)"
_OF_OPTIMIZERS = "where an optimizer shares out its work among the ranks, as Muon may, let each rank update the state of all parameters"
# Characters of a value that a message shows.
_SHORT = 100


class CaptureCheck:
    """Compares the state that the ranks would store: all JSON, names and forms of all tensors, contents of the job's own tensors.

    A comparison starts at one step and is finished at a later one, so that no rank waits for another.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pending: DigestComparison | None = None
        self._known: dict[str, tuple[Any, str]] = {}

    @property
    def is_pending(self) -> bool:
        """True between `start` and `finish`."""
        return self._pending is not None

    def start(self, captured: Captured) -> None:
        """Send the other ranks a digest of *captured*; does not wait. Every rank.

        A rank whose schedule was cut short by StopTraining sends a digest that does not count: it will train no more.
        """
        if self._worker.world_size > 1:
            counts = self._worker.vote.stop_wanted is None
            self._pending = DigestComparison(self._text(captured) if counts else None)

    def finish(self, capture: Callable[[], Captured]) -> None:
        """Make sure that all ranks sent the same digest last, if any. Every rank.

        Raises:
            RanksDifferError: the digests differ; the message names the first difference, on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.are_equal():
            raise self._difference(capture())

    def _text(self, captured: Captured) -> str:
        texts = [
            self._digest("", captured.tree, depth=2),
            self._once("forms", captured.tensors, lambda: sorted(_forms(captured).items())),
            json.dumps(_own_sums(captured)),
        ]
        return " ".join(texts)

    def _digest(self, path: str, value: Any, depth: int) -> str:
        if depth and isinstance(value, dict):
            texts = [f"{k}: {self._digest(f'{path}/{k}', v, depth - 1)}" for k, v in value.items()]
            return _hash("\n".join(texts))
        return self._once(path, value, lambda: value)

    def _once(self, path: str, value: Any, content: Callable[[], Any]) -> str:
        """Return a digest of *content*, known from before if *value* is the same object, as in most of a state."""
        known = self._known.get(path)
        if known is None or known[0] is not value:
            known = self._known[path] = value, _hash(json.dumps(content()))
        return known[1]

    def _difference(self, captured: Captured) -> RanksDifferError:
        mine = {**dict(_leaves(captured.tree, "")), **_forms(captured)}
        mine |= {key: f"{mine[key]}, its bits together {bits}" for key, bits in _own_sums(captured).items()}
        ranks = [json.loads(text) for text in self._worker.gather_text(json.dumps(mine))]
        for path in sorted({path for leaves in ranks for path in leaves}):
            for rank, leaves in enumerate(ranks):
                if leaves.get(path) != ranks[0].get(path):
                    return RanksDifferError(
                        f"a snapshot holds one state, and rank {rank}'s {path} is {_shown(leaves.get(path))}, "
                        f"rank 0's {_shown(ranks[0].get(path))}",
                        _OF_OPTIMIZERS if path.startswith("optimizer") else _REMEDY,
                    )
        return RanksDifferError("a snapshot holds one state, and the ranks had different ones a step ago")


def _forms(captured: Captured) -> dict[str, str]:
    """Return the form of each tensor by key: its type, shape, ties and memory format."""
    forms = {}
    for key, tensor in captured.tensors.items():
        box = captured.boxes.get(key)
        shape = tuple(tensor.shape) if box is None else f"{box.shape} in {box.shards.degree} parts"
        forms[key] = f"a tensor of {tensor.dtype}, {shape}"
    for name, facts in (("tied to", captured.aliases), ("laid out as", captured.memory_formats)):
        for key, fact in facts.items():
            forms[key] = f"{forms.get(key, 'a tensor')}, {name} {fact}"
    return forms


def _own_sums(captured: Captured) -> dict[str, str]:
    """Return a sum over the bits of each tensor of the job's own objects, in hexadecimal; without the buffers of modules."""
    own = {
        key: tensor
        for key, tensor in captured.tensors.items()
        if key.startswith(_OWN) and key not in captured.boxes and key not in captured.buffers
    }
    return {key: f"{number & (2**64 - 1):x}" for key, number in checksums.sums_of(own).items()}


def _hash(text: str) -> str:
    # A name of a file that is no UTF-8 may be a key.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}/{number}")
    else:
        yield path, json.dumps(value)


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _SHORT else f"{value[:_SHORT]}..."
