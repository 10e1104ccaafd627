"""Datasets that can only be read in order: opened as data shards, read into batches.

Each rank reads some of the shards, always the same ones while a group lives. What a step takes of each shard follows
from the position (`runtime/data/shard_schedule.py`), so ranks exchange nothing but whether some shard may end in the next step:
only then do they compare what their shards still have.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow import events
from elasticflow.errors import DatasetError
from elasticflow.runtime.data.dataset import OpenedDataset, confirm, opened
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.loader_processes import LeaveWhileWaiting
from elasticflow.runtime.data.sample_reader import checked_collate
from elasticflow.runtime.data.shard_reader import Chunk, ShardReader, read_ahead, require_iterable
from elasticflow.runtime.data.step_plan import micro_batch_ranges
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.process.stopping import Leaving, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from elasticflow.runtime.data.shard_schedule import ShardSchedule
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_LEAVING = "leaving"
_LOG_EVERY = 10  # notes of samples passed, about a second apart


class DataShards(NamedTuple):
    """A dataset that is read in data shards.

    Attributes:
        build: Function of `shard` and `shards` that returns an iterable of the shard's samples in order.
    """

    build: Callable[..., Any]
    number: int
    first: Any


def open_shards(worker: Worker, build: Callable[..., Any], name: str, shards: int) -> OpenedDataset:
    """Return the dataset whose shards *build* makes. Collective: every rank.

    No sample is read: its fingerprint is of the number of shards and of what shard 0 is, or says of itself.

    Raises:
        DatasetError: there are fewer shards than workers, or they cannot be iterated over.
    """
    if worker.world_size > shards:
        raise DatasetError(
            f"{worker.world_size} workers cannot share {shards} data shards",
            "start fewer workers; a new run may set dataset.shards higher",
        )
    first = require_iterable(build(shard=0, shards=shards))
    own = getattr(first, "fingerprint", None)
    own = own() if callable(own) else own
    fingerprint = sha256(f"{shards} {_name(first)} {own}".encode()).hexdigest()[:16]
    confirm(
        worker,
        name,
        fingerprint,
        sizes={"samples": None, "shards": shards},
        source=str(getattr(first, "source", None) or _name(first)),
        remedy="make sure that every node sees the same files",
    )
    return OpenedDataset(DataShards(build, shards, first), fingerprint)


def _name(shard: Any) -> str:
    if hasattr(shard, "gi_code"):  # a generator is called like its function
        return str(shard.__qualname__)
    return f"{type(shard).__module__}.{type(shard).__qualname__}"


class ShardLoader:
    """Reads this rank's part of every global batch: samples of its own data shards.

    Args:
        num_workers: Loader processes, each of which reads whole shards; 0 reads in this process.
        virtual_shards: Virtual shards per batch, with exact consistency: each is a micro-batch from its own data shards.

    Raises:
        DatasetError: *collate* cannot be called.
    """

    def __init__(
        self,
        worker: Worker,
        dataset: OpenedDataset | DataShards,
        schedule: ShardSchedule,
        micro_batch_size: int | None,
        *,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        virtual_shards: int | None = None,
    ) -> None:
        self._worker, self._schedule = worker, schedule
        self._shards: DataShards = opened(dataset).content
        self._micro_batch_size, self._num_workers = micro_batch_size, num_workers
        self._collate = checked_collate(collate)
        number = self._shards.number
        self._per_part = number // (virtual_shards or number)
        self._parts = range(*even_split(number // self._per_part, worker.world_size, worker.rank))
        self._is_exact = virtual_shards is not None

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield the steps after *position* up to the end, or until all ranks exit. Collective: every rank.

        Raises:
            DatasetError: *position* is of another number of shards, or a shard has fewer samples than were trained on.
        """
        worker, schedule = self._worker, self._schedule
        number = self._shards.number
        if len(position.cursors) != number:
            raise DatasetError(
                f"the position is in {len(position.cursors)} data shards, and the dataset is read in {number}",
                "continue with the dataset.shards that the run began with, or start a new run",
            )
        if worker.should_leave:
            return
        supply = ShardSupply(worker, self._feeds(position))
        live, is_plenty = [True] * number, False
        while not schedule.is_end(position):
            worker.generators.before_data()
            try:
                end = schedule.next(position, live, supply, is_plenty=is_plenty)
            except Leaving:
                return  # on every rank: see `ShardSupply.look`
            samples, position = end.samples - position.samples, end
            pieces = self._pieces(supply.taken())
            # Read before this step's vote, with which the ranks tell each other.
            try:
                is_short = not schedule.is_end(position) and not supply.has(schedule.wanted(position, live))
            except Leaving:  # with that vote all ranks exit
                is_short = True
            worker.generators.after_data()
            worker.vote.count_wanted = is_short
            keys = [random_streams.model_key(worker.seed, position.step, *key) for key, _ in pieces]
            yield Batch(samples, position, keys, self._micro_batches(position.step, pieces))
            is_plenty = not worker.vote.count

    def _feeds(self, position: Position) -> dict[int, Iterator[Chunk]]:
        """Return where the samples of each own shard come from, in the order of their numbers."""
        own = range(self._parts.start * self._per_part, self._parts.stop * self._per_part)
        reader = ShardReader(
            self._shards.build,
            self._shards.number,
            seed=self._worker.seed,
            size=-(-self._schedule.global_batch_size // self._shards.number),
            epochs=self._schedule.epochs,
        )
        feeds: dict[int, Iterator[Chunk]] = {}
        number = min(self._num_workers, len(own)) or len(own)
        for shards in (own[i::number] for i in range(number)):
            chunks = reader.chunks(shards, position.epoch, position.cursors)
            feed = chunks
            if self._num_workers:
                feed = read_ahead(chunks, self._shards.first, LeaveWhileWaiting(self._worker))
            feeds |= dict.fromkeys(shards, feed)
        return dict(sorted(feeds.items()))

    def _pieces(self, taken: Mapping[int, list[Any]]) -> list[tuple[tuple[int, int], list[Any]]]:
        """Return the micro-batches, each with what its random streams are keyed by besides seed and step."""
        if self._is_exact:
            shards = {part: range(part * self._per_part, (part + 1) * self._per_part) for part in self._parts}
            return [((part, 0), [s for n in shards[part] for s in taken.get(n, ())]) for part in self._parts]
        samples = [sample for shard in sorted(taken) for sample in taken[shard]]
        cuts = micro_batch_ranges(len(samples), self._micro_batch_size)
        return [((self._worker.rank, number), samples[low:high]) for number, (low, high) in enumerate(cuts)]

    def _micro_batches(
        self, step: int, pieces: list[tuple[tuple[int, int], list[Any]]]
    ) -> Iterator[tuple[Any, int]]:
        worker, transfer = self._worker, transfer_to(self._worker.device)
        for (first, second), samples in pieces:
            with mark("data"):
                batch = None
                if samples:  # else a virtual shard whose data is used up
                    worker.generators.before_data()
                    random_streams.seed_all(random_streams.batch_key(worker.seed, step, first, second))
                    batch = self._collate(samples)
                    worker.generators.after_data()
                    batch = transfer.move(batch)
            yield batch, len(samples)


class ShardSupply:
    """The samples of this rank's shards, some read ahead; see `shard_schedule.Supply`.

    Args:
        feeds: Where the samples of each own shard come from, by number, ascending; one feed may be several shards'.
    """

    def __init__(self, worker: Worker, feeds: Mapping[int, Iterator[Chunk]]) -> None:
        self._worker, self._feeds = worker, feeds
        self._waiting: dict[int, deque[Any]] = {shard: deque() for shard in feeds}
        self._ended: set[int] = set()
        self._taken: dict[int, list[Any]] = {}
        self._notes = 0

    def look(self, wanted: Sequence[int]) -> list[int]:
        """Return the number of samples that each shard still has, counted up to *wanted*. Collective: every rank.

        Raises:
            Leaving: some rank was asked to exit while it waited for samples; raised on every rank.
        """
        worker = self._worker
        try:
            mine = " ".join(str(self._count(shard, wanted[shard])) for shard in self._feeds)
        except Leaving:
            mine = _LEAVING
        texts = worker.gather_text(mine)
        if _LEAVING in texts:
            worker.stopped = Stopped(None, texts.index(_LEAVING))
            raise Leaving
        return [int(text) for of_rank in texts for text in of_rank.split()]

    def has(self, wanted: Sequence[int]) -> bool:
        """True if this rank's shards have as many samples as *wanted*."""
        counts = [self._count(shard, wanted[shard]) for shard in self._feeds]
        return counts == [wanted[shard] for shard in self._feeds]

    def take(self, counts: Sequence[int]) -> None:
        """Make the next *counts* samples the step's."""
        for shard, waiting in self._waiting.items():
            if counts[shard]:
                samples = [waiting.popleft() for _ in range(counts[shard])]
                self._taken.setdefault(shard, []).extend(samples)

    def turn(self) -> None:
        """Begin the next epoch."""
        self._ended.clear()

    def taken(self) -> dict[int, list[Any]]:
        """Return the step's samples of each shard, and forget them."""
        taken, self._taken = self._taken, {}
        return taken

    def _count(self, shard: int, most: int) -> int:
        waiting = self._waiting[shard]
        while len(waiting) < most and shard not in self._ended:
            self._receive(next(self._feeds[shard]))
        return min(len(waiting), most)

    def _receive(self, chunk: Chunk) -> None:
        self._waiting[chunk.shard].extend(chunk.samples)
        if chunk.is_end:
            self._ended.add(chunk.shard)
        if chunk.passed:
            self._worker.heartbeat.beat()
            if self._worker.vote.leave_wanted:  # the way to the cursor may be long
                raise Leaving
            if self._worker.rank == 0 and self._notes % _LOG_EVERY == 0:
                self._worker.event(events.DATASET_PASSED, shard=chunk.shard, samples=chunk.passed)
            self._notes += 1
