"""From what a loader reads to the batches that a loop of the script's own gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.data.step_plan import max_samples
from elasticflow.runtime.own_loop.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.data.dataset import OpenedDataset
    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.data.index_schedule import IndexSchedule
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_FILLERS = 2  # samples of a rank that has none: BatchNorm refuses a single one


def in_parts(part: OwnPart, number: int | None) -> Batch:
    """Return the batch whose parts `Run.gradients` reads one by one: virtual shards, or micro-batches."""
    return Batch(part.samples, part.samples, 1.0, part.end, part.samples, number=number, shards=part)


class Reader:
    """Makes this rank's batches of what the loader reads."""

    def __init__(
        self,
        worker: Worker,
        dataset: OpenedDataset,
        schedule: IndexSchedule,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
    ) -> None:
        self._worker, self._schedule = worker, schedule
        self._reader = SampleReader(dataset.content, collate, seed, generators=worker.generators)

    def batch(self, part: OwnPart, end: Position, number: int | None) -> Batch:
        """Return this rank's part of a global batch; samples that count nothing where it has none.

        Args:
            part: What the loader reads.
            end: Position after the step, counted from the beginning of its stage.
            number: Of the batch in its epoch.
        """
        ranks, total = self._worker.world_size, part.samples
        most = max_samples(total, self._schedule.global_batch_size, ranks)
        for data, count in part.micro_batches:
            return Batch(count, total, count * ranks / total, part.end, most, data, number)
        first = end.offset - total
        places = np.arange(first, first + min(_FILLERS, total), dtype=np.int64)
        data = self._reader.read(first, self._schedule.indices(places).tolist())
        data = index_loader.to_device(data, self._worker.device)
        return Batch(0, total, 0.0, part.end, most, data, number)
