"""The data of `Run.batches`: opened, ordered, and read as the batches of a loop that the script writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elasticflow.errors import StateError
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.data.index_loader import IndexLoader, open_dataset
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.data.shard_loader import ShardLoader
from elasticflow.runtime.data.shard_schedule import ShardSchedule
from elasticflow.runtime.data.step_plan import max_samples, shards_of_batch
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.loop_schedule import overall, stage_seed, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.loop.gradients import Gradients
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_FILLERS = 2  # samples of a rank that has none: BatchNorm refuses a single one


class Source:
    """The data of a loop. Collective: every rank makes one.

    Args:
        length: Either `epochs` or `steps`, and `tail`.

    Attributes:
        schedule: Which samples make up which step, counted from the beginning of the stage.
        virtual_shards: Parts of a batch, each of which is one forward; None: each rank's part is cut into micro-batches.

    Raises:
        DatasetError: the data cannot be read in this way, or differs between ranks.
    """

    schedule: IndexSchedule | ShardSchedule

    def __init__(
        self,
        worker: Worker,
        dataset: Any,
        gradients: Gradients | None,
        options: dict[str, Any],
        *,
        micro_batch_size: int | None,
        size: int,
        order: Order | None,
        shards: int | None,
        stage: int = 0,
        **length: Any,
    ) -> None:
        self.stage, self._seed = stage, stage_seed(worker.seed, stage)
        self._worker, self._gradients, self._options = worker, gradients, options
        self.virtual_shards = None if gradients is None else gradients.virtual_shards
        if self.virtual_shards is None and worker.layout.is_cut:
            self.virtual_shards = shards_of_batch(size, micro_batch_size, worker.world_size)
        self._micro_batch_size = micro_batch_size
        if gradients is None and (micro_batch_size is not None or shards is not None):
            raise StateError(
                "run.batches gives each rank its part of a batch as a whole, read by index",
                "micro_batch_size and shards need elasticflow.join(gradients=elasticflow.Gradients()); batch.parts cuts a batch",
            )
        if shards is not None and worker.layout.is_cut:
            raise StateError(
                "workers that share a model read samples by index, and not data shards in order",
                "give run.batches a map-style dataset, without shards=",
            )
        if isinstance(dataset, OpenedDataset):
            self.opened = dataset
        else:
            self.opened = open_dataset(worker, lambda: dataset, "train", given_to="run.batches")
        if shards is not None:
            self.schedule = ShardSchedule(shards, size, virtual_shards=self.virtual_shards, **length)
        else:
            ordered = {"seed": self._seed} if order is None else {"order": order}
            samples = len(self.opened if order is None else order)
            self.schedule = IndexSchedule(samples, size, **length, **ordered)

    def batches(self, position: Position) -> Iterator[tuple[OwnPart, Batch]]:
        """Yield what this rank reads of each step after *position*, and the script's batch of it."""
        loader, reader = self._loader(), None
        if self._gradients is None:
            collate, generators = self._options.get("collate"), self._worker.generators
            reader = SampleReader(self.opened.content, collate, self._seed, generators=generators)
        for part in loader.batches(within(position)):
            whole = part._replace(end=overall(part.end, position.stage)) if position.stage else part
            number, total = self._number_in_epoch(part), part.samples
            if reader is None:  # `Run.gradients` reads virtual shards, or micro-batches, one by one
                yield whole, Batch(total, total, 1.0, whole.end, total, number=number, shards=whole)
            else:
                data, count = next(part.micro_batches, (None, 0))
                if count == 0:
                    data = self._fillers(reader, part)
                ranks = self._worker.world_size
                most = max_samples(total, self.schedule.global_batch_size, ranks)
                yield whole, Batch(count, total, count * ranks / total, whole.end, most, data, number)

    def _fillers(self, reader: SampleReader, part: OwnPart) -> Any:
        """Return a batch of another rank's samples, which count nothing, for a rank that has none."""
        assert isinstance(self.schedule, IndexSchedule)
        first = part.end.offset - part.samples
        places = np.arange(first, first + min(_FILLERS, part.samples), dtype=np.int64)
        data = reader.read(first, self.schedule.indices(places).tolist())
        return transfer_to(self._worker.device).move(data)

    def _number_in_epoch(self, part: OwnPart) -> int | None:
        if isinstance(self.schedule, ShardSchedule):
            return None
        # The last batch of an epoch whose tail is dropped ends where the dropped samples do; their number is less than a batch.
        first = part.end.offset - part.samples
        return first % self.schedule.samples // self.schedule.global_batch_size

    def _loader(self) -> IndexLoader | ShardLoader:
        options = {**self._options, "virtual_shards": self.virtual_shards}
        given = (self._worker, self.opened)
        if isinstance(self.schedule, ShardSchedule):
            return ShardLoader(*given, self.schedule, self._micro_batch_size, **options)
        return IndexLoader(*given, self.schedule, self._micro_batch_size, seed=self._seed, **options)
