"""Datasets opened, and batches read in the schedule's order."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.runtime.data import overlap
from elasticflow.runtime.data.dataset import (
    OpenedDataset,
    checked_length,
    confirm,
    opened,
    require_same_values,
    require_the_same_samples,
    source_of,
    values_of,
)
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.data.fingerprint import look_at
from elasticflow.runtime.data.loader_processes import LeaveWhileWaiting, LoaderProcesses
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.data.step_plan import StepPlan
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elasticflow.runtime.data.index_schedule import IndexSchedule
    from elasticflow.runtime.data.step_plan import Read
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position


def open_dataset(
    worker: Worker,
    build: Callable[[], Any],
    name: str,
    samples: int | None = None,
    *,
    values: Mapping[str, str] | None = None,
    apart_from: OpenedDataset | None = None,
    given_to: str | None = None,
) -> OpenedDataset:
    """Return the dataset that *build* makes, checked, the same data on every rank. Collective: every rank.

    Args:
        build: Calls the job's factory; what it draws at random follows from the seed.
        values: Attributes that arguments of the job stand for, as in `"${dataset.vocab_size}"`, each with the key of one.
        apart_from: Training data that is to have none of its samples: where it has, one rank says so when the run
            begins to train.
        given_to: The call that a script passed the dataset to, such as `run.batches`, for messages; None: the job's factory makes it.

    Raises:
        DatasetError: it has no length or another one than *samples*, the ranks opened different data, or, in exact mode, a
            sample is not the same when it is read again.
        JobKeyError: it has no such attribute.
    """
    # The same for the training data and the evaluation's: one factory permutes alike for either.
    random_streams.begin(worker.seed, "data")
    content = build()
    sizes = {"samples": checked_length(content, name, samples, given_to)}
    attributes = values_of(content, values or {})
    fingerprint = require_the_same_samples(worker, name, look_at(content))
    confirm(
        worker,
        name,
        fingerprint,
        sizes=sizes,
        values=attributes,
        source=source_of(content),
        remedy="make sure that every node sees the same files, and that what is drawn at random is drawn from random, "
        "numpy's global generator or torch's: they begin in the same state on every rank, and generators without a seed do not",
    )
    require_same_values(worker, attributes)
    if name == "train":
        worker.dataset = content
    if apart_from is not None and worker.rank == 0:
        worker.moments.beginning.append(partial(overlap.warn, worker, opened(apart_from).content, content))
    return OpenedDataset(content, fingerprint, attributes)


def prepare_data(worker: Worker, fn: Callable[[], object]) -> None:
    """Run *fn*, which gets the data in place, once per node, before any rank continues. Collective: every rank."""
    if worker.local_rank == 0:
        random_streams.begin(worker.seed, "data")
        fn()
    worker.leave_if_asked()  # waits for all
    worker.reseed()


class Batch(NamedTuple):
    """One step's samples, as far as this rank reads them.

    Attributes:
        model_keys: For each micro-batch, the seed under which the model runs; none for a rank without samples.
        micro_batches: Yields (batch on the device, number of its samples); can be read once.
    """

    samples: int
    end: Position
    model_keys: list[int]
    micro_batches: Iterator[tuple[Any, int]]


class IndexLoader:
    """Reads this rank's part of every global batch.

    Args:
        virtual_shards: Virtual shards of each batch, read one by one; None: micro-batches.
    """

    def __init__(
        self,
        worker: Worker,
        dataset: Any,
        schedule: IndexSchedule,
        micro_batch_size: int | None,
        *,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        virtual_shards: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._worker, self._num_workers = worker, num_workers
        self._transfer = transfer_to(worker.device)
        seed = worker.seed if seed is None else seed
        self._plan = StepPlan(
            schedule,
            micro_batch_size,
            layout=worker.layout,
            seed=seed,
            virtual_shards=virtual_shards,
        )
        generators = None if num_workers else worker.generators
        self._content = opened(dataset).content
        self._reader = SampleReader(
            self._content, collate, seed, generators=generators, has_repeats=schedule.order.has_repeats
        )

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield the steps after *position* up to the schedule's end; none if all ranks are about to exit."""
        if self._worker.should_leave:
            return
        fetch = self._in_processes(position) if self._num_workers else None
        for samples, end, reads, model_keys in self._plan.after(position):
            micro_batches = self._micro_batches(reads, fetch)
            yield Batch(samples, end, model_keys, micro_batches)
            if fetch is not None and not self._worker.should_leave:
                # A script may continue after an error within the step: the next step must get its own samples.
                deque(micro_batches, maxlen=0)

    def _micro_batches(self, reads: list[Read], fetch: Iterator[Any] | None) -> Iterator[tuple[Any, int]]:
        for place, indices in reads:
            with mark("data"):
                if fetch is None:
                    data = self._transfer.move(self._reader.read(place, indices))
                else:
                    data = next(fetch)
            yield data, len(indices)

    def _in_processes(self, position: Position) -> Iterator[Any]:
        reads = (read for step in self._plan.after(position) for read in step.reads)
        self._worker.moments.begin()
        wait, pins_memory = LeaveWhileWaiting(self._worker), self._transfer.pins_memory
        processes = LoaderProcesses(
            self._reader, self._content, reads, self._num_workers, pins_memory=pins_memory, wait=wait
        )
        return self._transfer.move_ahead(processes)
