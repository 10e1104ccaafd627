"""Steps over data shards of unknown lengths: every sample once, in an order that nothing but the data decides."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.shard_schedule import ShardSchedule, shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.runtime.process.position import Position

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)


class Shards:
    """Data shards of known lengths, as a schedule sees them; remembers (epoch, shard, number) of what was taken."""

    def __init__(self, lengths: Sequence[int], position: Position) -> None:
        self.lengths, self.epoch = lengths, position.epoch
        self.cursors = list(position.cursors)
        self.taken: list[tuple[int, int, int]] = []
        self.looks = 0

    def look(self, wanted: Sequence[int]) -> list[int]:
        """Count what is left."""
        self.looks += 1
        return [
            min(length - cursor, most)
            for length, cursor, most in zip(self.lengths, self.cursors, wanted, strict=True)
        ]

    def take(self, counts: Sequence[int]) -> None:
        """Take them."""
        for shard, count in enumerate(counts):
            assert self.cursors[shard] + count <= self.lengths[shard]
            begin = self.cursors[shard]
            self.taken += [(self.epoch, shard, number) for number in range(begin, begin + count)]
            self.cursors[shard] += count

    def turn(self) -> None:
        """Begin anew; nothing may be left."""
        assert self.cursors == list(self.lengths)
        self.epoch += 1
        self.cursors = [0] * len(self.lengths)


def walk(
    schedule: ShardSchedule, lengths: Sequence[int], position: Position, most: int
) -> tuple[list[list[tuple[int, int, int]]], Position]:
    """Return what each of the next steps takes, *most* of them, and the position after them."""
    supply, live = Shards(lengths, position), [True] * schedule.shards
    is_plenty = False
    found: list[list[tuple[int, int, int]]] = []
    while not schedule.is_end(position) and len(found) < most:
        begin = len(supply.taken)
        before, position = position, schedule.next(position, live, supply, is_plenty=is_plenty)
        found.append(sorted(supply.taken[begin:]))
        assert position.samples - before.samples == len(found[-1]) > 0
        assert position.cursors == tuple(supply.cursors)
        # What the ranks' vote tells: nobody has to look before the next step.
        wanted = schedule.wanted(position, live)
        is_plenty = not schedule.is_end(position) and supply.look(wanted) == wanted
    return found, position


@given(count=st.integers(0, 60), cursors=st.lists(st.integers(0, 12), min_size=1, max_size=9))
def test_shares_follow_the_rule(count: int, cursors: list[int]) -> None:
    """The closed form gives what taking one sample after the other gives."""
    expected, heap = [0] * len(cursors), [(cursor, number) for number, cursor in enumerate(cursors)]
    heapq.heapify(heap)
    for _ in range(count):
        cursor, number = heap[0]
        heapq.heapreplace(heap, (cursor + 1, number))
        expected[number] += 1
    assert expected == shares(count, cursors)


@given(lengths=LENGTHS, data=st.data())
def test_every_sample_of_every_epoch_once(lengths: list[int], data: st.DataObject) -> None:
    """Shards of any length, empty ones too; the batch size changes wherever a run is interrupted."""
    tail, epochs = data.draw(st.sampled_from(["spill", "short"])), data.draw(st.integers(1, 3))
    parts = data.draw(st.sampled_from([n for n in range(1, len(lengths) + 1) if len(lengths) % n == 0]))
    seen: list[tuple[int, int, int]] = []
    position = None
    while True:
        size = parts * data.draw(st.integers(1, 8))
        schedule = ShardSchedule(len(lengths), size, epochs=epochs, tail=tail, virtual_shards=parts)
        position = position or schedule.start
        steps, position = walk(schedule, lengths, position, data.draw(st.integers(1, 20)))
        seen += [sample for step in steps for sample in step]
        if schedule.is_end(position):
            break
    assert sorted(seen) == [(e, s, i) for e in range(epochs) for s, n in enumerate(lengths) for i in range(n)]
    assert position.samples == len(seen)
    assert [sample[0] for sample in seen] == sorted(sample[0] for sample in seen)


@given(lengths=LENGTHS, size=st.integers(1, 40), tail=st.sampled_from(["spill", "short"]), data=st.data())
def test_interruptions_leave_no_trace_in_the_order(
    lengths: list[int], size: int, tail: str, data: st.DataObject
) -> None:
    """A run that forgets all but its position after some steps makes the same steps as one that continues."""
    schedule = ShardSchedule(len(lengths), size, epochs=2, tail=tail)
    whole, end = walk(schedule, lengths, schedule.start, 10**6)
    position, found = schedule.start, []
    while not schedule.is_end(position):
        steps, position = walk(schedule, lengths, position, data.draw(st.integers(1, 5)))
        found += steps
    assert whole == found
    assert end == position


@given(lengths=LENGTHS, per_shard=st.integers(1, 5))
def test_batches_are_full_until_an_epoch_ends(lengths: list[int], per_shard: int) -> None:
    """Only an epoch's last batch is smaller; one is larger by the single samples that shards would have kept."""
    size = per_shard * len(lengths)
    for tail, most_small in (("spill", 1), ("short", 3)):
        schedule = ShardSchedule(len(lengths), size, epochs=3, tail=tail)
        steps, _ = walk(schedule, lengths, schedule.start, 10**6)
        sizes = [len(step) for step in steps]
        assert sum(count < size for count in sizes) <= most_small
        assert all(count <= size + len(lengths) for count in sizes)


def test_a_single_sample_is_not_left_behind() -> None:
    """BatchNorm refuses it: the shard's last step takes it along."""
    schedule = ShardSchedule(2, 4, epochs=1)
    steps, _ = walk(schedule, [5, 4], schedule.start, 10)
    assert [len(step) for step in steps] == [4, 5]


def test_virtual_shards_feed_on_their_own_data() -> None:
    """A virtual shard whose data is used up gets none of another's; the batch is smaller then."""
    schedule = ShardSchedule(4, 8, epochs=1, virtual_shards=2)
    steps, _ = walk(schedule, [2, 2, 6, 6], schedule.start, 10)
    assert [len(step) for step in steps] == [8, 4, 4]
    assert {shard for _, shard, _ in steps[1]} == {2, 3}


def test_nobody_looks_while_all_shards_go_on() -> None:
    """The schedule asks for counts at the start and where a shard ends, not at every step."""
    schedule = ShardSchedule(2, 8, epochs=1)
    supply, live, position = Shards([400, 400], schedule.start), [True, True], schedule.start
    for number in range(90):
        position = schedule.next(position, live, supply, is_plenty=number > 0)
    assert supply.looks == 1


def test_the_end_is_known_with_the_last_step() -> None:
    """No empty step is made to find out, and what is left is unknown before."""
    schedule = ShardSchedule(2, 4, epochs=1)
    _, end = walk(schedule, [4, 4], schedule.start, 10)
    assert (end.step, end.epoch, end.is_epoch_end, end.cursors) == (2, 1, True, (0, 0))
    assert schedule.is_end(end)
    assert (schedule.remaining(schedule.start), schedule.remaining(end)) == (None, 0)
    assert ShardSchedule(2, 4, steps=7).remaining(end) == 5


def test_an_epoch_without_samples_is_refused() -> None:
    """Else a run by steps would look for the first one for ever."""
    schedule = ShardSchedule(3, 4, steps=7)
    with pytest.raises(DatasetError, match="none of the 3 data shards has a sample in epoch 1"):
        walk(schedule, [0, 0, 0], schedule.start, 10)
