"""Computes, for many steps at a time, the samples that a rank reads.

After a step of training the caches are cold, so that every line of Python between two steps costs several times
its cost in a tight loop. So this module computes ahead.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elasticflow.errors import StateError
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import even_split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.data.index_schedule import IndexSchedule
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.shard_layout import ShardLayout

_SAMPLES_AHEAD = 4096  # numpy's cost per call is shared out, and still no step waits long for it
_MOST_STEPS_AHEAD = 128


Read = tuple[int, list[int]]
"""Samples that make a batch: the first one's place in the endless stream, and the indices of all."""


class PlannedStep(NamedTuple):
    """One step, as far as one rank takes part.

    Attributes:
        model_keys: For each micro-batch, the seed under which the model runs.
    """

    samples: int
    end: Position
    reads: list[Read]
    model_keys: list[int]


class Piece(NamedTuple):
    """Samples of a batch that are read and run together.

    Attributes:
        key: Key of the model's random streams, besides seed and step: rank and micro-batch, or the virtual
            shard.
    """

    key: tuple[int, int]
    low: int
    high: int


class StepPlan:
    """The steps of one rank.

    Args:
        virtual_shards: Virtual shards per batch; None: each rank's part is cut into micro-batches.
    """

    def __init__(
        self,
        schedule: IndexSchedule,
        micro_batch_size: int | None,
        *,
        layout: ShardLayout,
        seed: int,
        virtual_shards: int | None = None,
    ) -> None:
        self._schedule, self._seed = schedule, seed
        mine = max(1, schedule.global_batch_size // layout.world_size)
        self._ahead = min(_MOST_STEPS_AHEAD, max(1, _SAMPLES_AHEAD // mine))
        size = schedule.global_batch_size

        def pieces(count: int) -> list[Piece]:
            if virtual_shards is not None:
                return shard_pieces(count, size, virtual_shards, layout)
            return rank_pieces(count, size, micro_batch_size, layout.world_size, layout.rank)

        self._pieces = lru_cache(maxsize=8)(pieces)  # nearly all batches have one size

    def after(self, position: Position) -> Iterator[PlannedStep]:
        """Yield the steps after *position* up to the schedule's end."""
        batches = _batches_after(self._schedule, position)
        while chunk := list(islice(batches, self._ahead)):
            yield from self._planned(chunk)

    def _planned(self, chunk: list[tuple[int, int, Position]]) -> list[PlannedStep]:
        planned = [(offset, count, end, self._pieces(count)) for offset, count, end in chunk]
        places = [
            np.arange(offset + low, offset + high, dtype=np.int64)
            for offset, _, _, pieces in planned
            for _, low, high in pieces
        ]
        samples = self._schedule.indices(np.concatenate(places)).tolist() if places else []
        steps, begin = [], 0
        for offset, count, end, pieces in planned:
            reads, keys = [], []
            for (first, second), low, high in pieces:
                reads.append((offset + low, samples[begin : begin + high - low]))
                keys.append(random_streams.model_key(self._seed, end.step, first, second))
                begin += high - low
            steps.append(PlannedStep(count, end, reads, keys))
        return steps


def rank_pieces(
    count: int, full: int, micro_batch_size: int | None, world_size: int, rank: int
) -> list[Piece]:
    """Return the micro-batches of *rank* in a batch of *count* samples, where a full one has *full*.

    A last, small batch goes to fewer ranks, two samples each: BatchNorm refuses a single one.
    """
    ranks = _num_ranks(count, full, world_size)
    if rank >= ranks:
        return []
    low, high = even_split(count, ranks, rank)
    if low == high:  # more ranks than samples
        return []
    cuts = micro_batch_ranges(high - low, micro_batch_size)
    return [Piece((rank, number), low + begin, low + end) for number, (begin, end) in enumerate(cuts)]


def max_samples(count: int, full: int, world_size: int) -> int:
    """Return the number of samples of the rank with the most, in a batch of *count* samples; a full batch has *full*."""
    return -(-count // _num_ranks(count, full, world_size))


def _num_ranks(count: int, full: int, world_size: int) -> int:
    return max(1, count // 2) if count < full and count < 2 * world_size else world_size


def micro_batch_ranges(count: int, most: int | None) -> list[tuple[int, int]]:
    """Return the half-open ranges of *count* samples that are micro-batches of at most *most*; None: all at once."""
    number = -(-count // (most or count or 1))
    return [even_split(count, number, part) for part in range(number)]


def shards_of_batch(size: int, micro_batch_size: int | None, world_size: int) -> int:
    """Return how many virtual shards a batch of *size* samples has in batch mode: as many micro-batches for each rank.

    Raises:
        StateError: there are fewer samples than ranks.
    """
    if size < world_size:
        raise StateError(
            f"{world_size} workers that share models cannot share a batch of {size} samples: each needs one",
            "start fewer workers, or use larger batches: dataset.global_batch_size",
        )
    each = -(-size // world_size)
    return min(size, world_size * len(micro_batch_ranges(each, micro_batch_size)))


def shard_pieces(count: int, full: int, virtual_shards: int, layout: ShardLayout) -> list[Piece]:
    """Return the virtual shards of a rank that have samples, in a batch of *count*, where a full one has *full*.

    A last, small batch fills only as many shards as it can fill as a full one does. Which samples a shard has does
    not depend on the world size.
    """
    filled = virtual_shards if count == full else max(1, count * virtual_shards // full)
    mine = (shard for shard in layout.leaves(virtual_shards) if shard < filled)
    return [Piece((shard, 0), *even_split(count, filled, shard)) for shard in mine]


def _batches_after(schedule: IndexSchedule, position: Position) -> Iterator[tuple[int, int, Position]]:
    for _ in range(schedule.remaining(position)):
        offset, count, position = schedule.batch(position)
        yield offset, count, position
