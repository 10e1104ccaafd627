"""One pass over a set, shared out among the ranks: numbers of each batch added up, and outputs brought to rank 0 in order."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.errors import MetricError, StateError, StopTraining
from elasticflow.runtime.data import notes
from elasticflow.runtime.data.packing import packed, unpacked
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.process.votes import LEAVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.runtime.evaluation.metric import OverSet
    from elasticflow.runtime.process.context import Worker

# Rank 0's metrics draw apart from the model's forwards, which are of piece 0.
_OF_METRICS = 1
_GONE = -1


class OfBatch(NamedTuple):
    """Outputs of one batch.

    Attributes:
        handed_over: For each metric over the whole set, what it is called with: outputs and targets.
    """

    numbers: list[float]
    handed_over: list[tuple[Any, Any]]
    num_samples: int


@contextmanager
def _alone() -> Iterator[None]:
    """Have libraries of metrics take this process for the only one: torchmetrics' would gather over all ranks.

    Rank 0 alone has the metrics, and they take in what all ranks had: nothing is left to be gathered.
    """
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized


class WholeSet:
    """Goes over a set once. Every rank makes one, and calls `run`.

    Args:
        width: How many numbers each batch gives.
        metrics: Over the whole set, on rank 0; other ranks have theirs only to know that there are some.
        in_step: Each forward waits for those of other ranks, as of a sharded model: every rank measures equally many batches,
            some of them for nothing, and no rank ends its part early.
    """

    def __init__(
        self,
        worker: Worker,
        batches: int,
        width: int,
        metrics: Sequence[OverSet],
        *,
        in_step: bool = False,
    ) -> None:
        self._worker, self._batches, self._metrics, self._in_step = worker, batches, metrics, in_step
        # The last row is not of a batch: it says whether this rank's part was cut short.
        self._rows = torch.zeros(batches + 1, width, dtype=torch.float64)
        self._rows[-1] = 1.0

    def run(self, measure: Callable[[int], OfBatch]) -> tuple[Tensor, list[float]] | None:
        """Return the sums over the set, added batch by batch, and the metrics' values: the same bits at every world size.

        None, on every rank, if StopTraining was raised on some rank, or some rank was asked to exit. Collective: every rank.

        Raises:
            MetricError: what a metric is called with cannot be brought to rank 0.
            StateError: StopTraining was raised where every rank must measure equally many batches.
        """
        values = torch.zeros(len(self._metrics), dtype=torch.float64)
        if self._metrics:
            self._run_in_rounds(measure, values)
        else:
            self._run_alone(measure)
        if self._worker.world_size > 1:
            dist.all_reduce(self._rows)  # each row is one rank's, and zeros of the others
            if self._metrics:
                dist.all_reduce(values)
        *of_batches, cut_short = self._rows
        if cut_short.any():
            return None
        total = torch.zeros_like(cut_short)
        for row in of_batches:
            total += row
        return total, values.tolist()

    def _run_alone(self, measure: Callable[[int], OfBatch]) -> None:
        """Measure this rank's part, which is one piece of the set."""
        worker = self._worker
        mine = range(*even_split(self._batches, worker.world_size, worker.rank))
        with self._stoppable():
            for number in mine:
                if self._leaves():
                    return
                self._note(number, measure(number))
            if self._in_step and len(mine) < -(-self._batches // worker.world_size):
                measure(0)  # counts nothing; other ranks wait for it
            self._rows[-1] = 0.0

    def _run_in_rounds(self, measure: Callable[[int], OfBatch], values: Tensor) -> None:
        """Measure every batch whose turn is this rank's; after each round rank 0's metrics take in what all ranks had."""
        worker, size = self._worker, self._worker.world_size
        for first in range(0, self._batches, size):
            mine: memoryview | None = None
            if not self._leaves():
                with self._stoppable():
                    mine = self._packed(first + worker.rank, measure)
            if not hand_over(worker, mine, partial(self._take, first)):
                return
            worker.heartbeat.beat()
        if worker.vote.stop_wanted is not None:  # a metric of rank 0 raised StopTraining
            return
        with worker.stoppable:
            if worker.rank == 0:
                worker.generators.seed_model(self._key(self._batches))
                with _alone():
                    for place, metric in enumerate(self._metrics):
                        values[place] = metric.value()
            self._rows[-1] = 0.0

    def _packed(self, number: int, measure: Callable[[int], OfBatch]) -> memoryview:
        if number >= self._batches:
            if self._in_step:
                measure(0)  # counts nothing; other ranks wait for it
            return memoryview(b"")
        of_batch = measure(number)
        self._note(number, of_batch)
        try:
            return packed((of_batch.handed_over, of_batch.num_samples)).getbuffer()
        except (TypeError, AttributeError, ValueError) as error:
            forms = "; ".join(notes.form(each) for each in of_batch.handed_over)
            raise MetricError(
                f"what a metric over the whole set is called with cannot be brought to rank 0 ({error}): {forms}",
                "choose the part that it needs with `outputs` and `targets`",
            ) from error

    def _take(self, first: int, rank: int, data: memoryview) -> None:
        worker = self._worker
        if worker.vote.stop_wanted is not None:
            return
        with worker.stoppable:
            handed_over, count = unpacked(data)
            worker.generators.seed_model(self._key(first + rank))
            with _alone():
                for metric, (outputs, targets) in zip(self._metrics, handed_over, strict=True):
                    metric.add(outputs, targets, count)

    def _key(self, number: int) -> int:
        return random_streams.model_key(self._worker.seed, 0, _OF_METRICS, number)

    def _note(self, number: int, of_batch: OfBatch) -> None:
        self._rows[number] = torch.tensor(of_batch.numbers, dtype=torch.float64)
        self._worker.heartbeat.beat()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Have StopTraining end this rank's part."""
        if not self._in_step:
            with self._worker.stoppable:
                yield
            return
        try:
            yield
        except StopTraining as stop:
            raise StateError(
                f"StopTraining was raised in an evaluation of a sharded model, for whose forwards the other ranks wait: {stop}",
                "raise it in a step of training, or call run.stop(reason) after the evaluation",
            ) from stop

    def _leaves(self) -> bool:
        """Return True if this rank must stop measuring; if it was asked to exit, record that as its request."""
        vote = self._worker.vote
        if self._in_step:
            return False
        if vote.leave_wanted and vote.may_cut_short:
            vote.stop_wanted = vote.stop_wanted or LEAVE
            return True
        return False


def hand_over(worker: Worker, mine: memoryview | None, take: Callable[[int, memoryview], None]) -> bool:
    """Have rank 0 call *take* with every rank and its bytes, in the order of the ranks. Collective: every rank.

    Rank 0 holds its own bytes and those of one other rank at a time.

    Args:
        mine: This rank's bytes; empty: it has none in this round; None: it was cut short, and no rank continues.

    Returns:
        False if some rank was cut short: nothing was handed over.
    """
    if worker.world_size == 1:
        if mine is not None and len(mine):
            take(0, mine)
        return mine is not None
    sizes = torch.zeros(worker.world_size, dtype=torch.int64)
    sizes[worker.rank] = _GONE if mine is None else len(mine)
    dist.all_reduce(sizes)
    if mine is None or bool((sizes == _GONE).any()):
        return False
    if worker.rank != 0:
        if len(mine):
            dist.send(torch.frombuffer(mine, dtype=torch.uint8), 0)
        return True
    for rank, size in enumerate(sizes.tolist()):
        if rank == 0 and size:
            take(rank, mine)
        elif size:
            received = torch.empty(size, dtype=torch.uint8)
            dist.recv(received, rank)
            take(rank, received.numpy().data)
    return True
