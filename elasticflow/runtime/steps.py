"""Which samples a rank reads in which step, worked out ahead for many steps at a time (floor R).

A step of training leaves the caches cold, so that every line of Python between two steps costs several times
what it costs in a loop of its own: whatever can be known ahead is worked out here.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elasticflow.runtime import streams
from elasticflow.runtime.order import Position, Schedule, split

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAMPLES_AHEAD = 4096  # numpy's cost per call is shared out, and still no step waits long for it
_MOST_STEPS_AHEAD = 128


class Step(NamedTuple):
    """One step, as far as one rank takes part.

    Attributes:
        samples: Samples of all ranks.
        end: Position after the step.
        pieces: For each micro-batch, the seed under which it is read and the indices of its samples.
        model_keys: For each micro-batch, the seed under which the model runs.
    """

    samples: int
    end: Position
    pieces: list[list[int]]
    model_keys: list[int]


class Plan:
    """The steps of one rank.

    Args:
        schedule: The order.
        micro_batch_size: Most samples in one forward, None for all of a rank's part at once.
        world_size: Ranks that share a batch.
        rank: This one.
        seed: Of the random streams.
    """

    def __init__(
        self, schedule: Schedule, micro_batch_size: int | None, *, world_size: int, rank: int, seed: int
    ) -> None:
        self._schedule, self._micro_batch_size = schedule, micro_batch_size
        self._world_size, self._rank, self._seed = world_size, rank, seed
        mine = max(1, schedule.global_batch_size // world_size)
        self._ahead = min(_MOST_STEPS_AHEAD, max(1, _SAMPLES_AHEAD // mine))

    def after(self, position: Position) -> Iterator[Step]:
        """Yield the steps after *position* up to the schedule's end."""
        batches = _batches_after(self._schedule, position)
        while chunk := list(islice(batches, self._ahead)):
            yield from self._planned(chunk)

    def _planned(self, chunk: list[tuple[int, int, Position]]) -> list[Step]:
        ranges = [
            rank_range(offset, count, self._schedule, self._world_size, self._rank)
            for offset, count, _ in chunk
        ]
        places = np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in ranges])
        samples = self._schedule.indices(places).tolist()
        steps, begin = [], 0
        for (_, count, end), (low, high) in zip(chunk, ranges, strict=True):
            steps.append(self._step(count, end, samples[begin : begin + high - low]))
            begin += high - low
        return steps

    def _step(self, count: int, end: Position, samples: list[int]) -> Step:
        size = self._micro_batch_size or max(1, len(samples))
        parts = -(-len(samples) // size)
        pieces, keys = [], []
        for part in range(parts):
            low, high = split(len(samples), parts, part)
            where = (self._seed, end.step, self._rank, part)
            pieces.append([streams.data_key(*where), *samples[low:high]])
            keys.append(streams.model_key(*where))
        return Step(count, end, pieces, keys)


def rank_range(offset: int, count: int, schedule: Schedule, world_size: int, rank: int) -> tuple[int, int]:
    """Return the places of the stream that *rank* reads of a batch.

    A last, small batch goes to fewer ranks, two samples each: BatchNorm refuses a single one.
    """
    ranks = world_size
    if count < schedule.global_batch_size and count < 2 * world_size:
        ranks = max(1, count // 2)
    if rank >= ranks:
        return offset + count, offset + count
    low, high = split(count, ranks, rank)
    return offset + low, offset + high


def _batches_after(schedule: Schedule, position: Position) -> Iterator[tuple[int, int, Position]]:
    for _ in range(schedule.remaining(position)):
        offset, count, position = schedule.batch(position)
        yield offset, count, position
