"""The schedule: its properties."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.errors import DatasetError, StateError
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.step_plan import rank_pieces, shard_pieces, shards_of_batch
from elasticflow.runtime.process.position import Position, even_split
from elasticflow.runtime.process.shard_layout import ShardLayout

TAILS = st.sampled_from(["spill", "short", "drop"])


def walk(schedule: IndexSchedule, position: Position | None = None) -> list[tuple[int, int, Position]]:
    """Return all steps after *position*."""
    position, found = position or schedule.start, []
    while not schedule.is_end(position):
        offset, count, position = schedule.batch(position)
        found.append((offset, count, position))
    return found


@given(samples=st.integers(1, 60), size=st.integers(1, 80), epochs=st.integers(1, 4), tail=TAILS)
def test_schedule_covers_every_epoch(samples: int, size: int, epochs: int, tail: str) -> None:
    """Every sample of every epoch is trained on once; "drop" leaves out less than a batch per epoch."""
    if tail == "drop" and samples < size:
        return
    schedule = IndexSchedule(samples, size, epochs=epochs, tail=tail, seed=5)
    seen = np.zeros((epochs, samples), dtype=int)
    steps = walk(schedule)
    for offset, count, _ in steps:
        places = np.arange(offset, offset + count)
        for epoch, sample in zip(places // samples, schedule.indices(places), strict=True):
            seen[epoch, sample] += 1
    left_out = samples % size if tail == "drop" else 0
    assert seen.max() == 1
    assert seen.sum(axis=1).tolist() == [samples - left_out] * epochs
    assert len(steps) == schedule.remaining(schedule.start)


@given(
    samples=st.integers(2, 60),
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    tail=TAILS,
    at=st.integers(0, 20),
)
def test_batch_size_may_change_at_any_position(
    samples: int, sizes: tuple[int, int], tail: str, at: int
) -> None:
    """Positions are in samples: what is left after a change is still covered once, and counted right."""
    if tail == "drop" and samples < max(sizes):
        return
    first, second = (IndexSchedule(samples, size, epochs=3, tail=tail) for size in sizes)
    position = first.start
    for _ in range(min(at, first.remaining(first.start))):
        _, _, position = first.batch(position)
    rest = walk(second, position)
    assert len(rest) == second.remaining(position)
    if tail != "drop":
        assert position.samples + sum(count for _, count, _ in rest) == 3 * samples


@given(count=st.integers(0, 10**15), parts=st.integers(1, 3000))
def test_split_is_contiguous_and_even(count: int, parts: int) -> None:
    """The parts meet, and their sizes differ by one at most."""
    ranges = [even_split(count, parts, i) for i in range(parts)]
    assert [low for low, _ in ranges[1:]] == [high for _, high in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, count)
    sizes = {high - low for low, high in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(
    count=st.integers(1, 40), world_size=st.integers(1, 12), micro=st.one_of(st.none(), st.integers(1, 50))
)
def test_ranks_share_a_batch(count: int, world_size: int, micro: int | None) -> None:
    """Every sample belongs to one micro-batch; a small last batch leaves no rank with a single one if it can."""
    found = [rank_pieces(count, 40, micro, world_size, rank) for rank in range(world_size)]
    pieces = [piece for of_rank in found for piece in of_rank]
    assert [i for piece in pieces for i in range(piece.low, piece.high)] == list(range(count))
    assert max(piece.high - piece.low for piece in pieces) <= (micro or 40)
    if 1 < count < 40:
        assert 1 not in [sum(p.high - p.low for p in of_rank) for of_rank in found]


@given(count=st.integers(1, 40), shards=st.integers(1, 20), data=st.data())
def test_shards_do_not_depend_on_the_world_size(count: int, shards: int, data: st.DataObject) -> None:
    """Every sample belongs to one virtual shard, the same at each world size; none is smaller than in a full batch."""
    world_size = data.draw(st.integers(1, shards))
    degree = data.draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    layouts = [ShardLayout(world_size, rank, degree) for rank in range(world_size)]
    pieces = sorted(piece for layout in layouts for piece in shard_pieces(count, 40, shards, layout))
    assert pieces == shard_pieces(count, 40, shards, ShardLayout(1, 0))
    assert [i for piece in pieces for i in range(piece.low, piece.high)] == list(range(count))
    assert min(piece.high - piece.low for piece in pieces) >= min(count, 40 // shards)


@given(
    size=st.integers(1, 60),
    micro=st.one_of(st.none(), st.integers(1, 70)),
    replicas=st.integers(1, 4),
    degree=st.integers(1, 4),
)
def test_shards_of_a_batch_are_micro_batches(
    size: int, micro: int | None, replicas: int, degree: int
) -> None:
    """Each rank has one, and none is larger than asked for, nor are there more than it takes."""
    world_size = replicas * degree
    if size < world_size:
        with pytest.raises(StateError, match=f"cannot share a batch of {size} samples"):
            shards_of_batch(size, micro, world_size)
        return
    shards = shards_of_batch(size, micro, world_size)
    layouts = [ShardLayout(world_size, rank, degree) for rank in range(world_size)]
    found = [shard_pieces(size, size, shards, layout) for layout in layouts]
    assert all(found)
    assert max(piece.high - piece.low for pieces in found for piece in pieces) <= (micro or size)
    assert shards <= world_size * math.ceil(math.ceil(size / world_size) / (micro or size))


def test_seek_is_independent_of_the_distance() -> None:
    """The position after 10**12 steps of a dataset of 10**15 samples needs no walk, and no memory."""
    schedule = IndexSchedule(10**15, 1024, epochs=3, seed=1)
    far = Position(10**12, 10**12 * 1024, 1, 10**12 * 1024, is_epoch_end=False)
    assert schedule.remaining(far) == -(-(3 * 10**15 - far.offset) // 1024)
    tracemalloc.start()
    found = schedule.indices(np.arange(far.offset, far.offset + 2)).tolist()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [886250840540300, 847387512787973] == found
    assert most < 100_000


def test_drop_of_everything_is_refused() -> None:
    """A batch larger than the dataset with tail = "drop" would train nothing."""
    with pytest.raises(DatasetError, match="has 10 samples, fewer than a global batch of 64"):
        IndexSchedule(10, 64, epochs=1, tail="drop")
