"""Data shards opened and read by several ranks: every sample once, the same batches at every world size."""

from __future__ import annotations

import itertools
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from elasticflow.errors import DatasetError
from elasticflow.runtime.data import shard_loader, shard_reader
from elasticflow.runtime.data.shard_schedule import ShardSchedule
from elasticflow.runtime.process.votes import Vote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.process.position import Position

Sample = tuple[int, int, int]


class Group:
    """Ranks as threads of this process, which gather and vote as worker groups do."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._texts = [""] * world_size
        self.gathers = 0

    def run(self, position: Position, most: int, make: Any) -> tuple[list[list[Sample]], Position]:
        """Return the samples of each of the next steps, *most* of them, sorted, and the position after them."""
        steps: list[list[list[Sample]]] = [[] for _ in range(self.world_size)]
        ends, errors = [position] * self.world_size, []

        def rank(number: int) -> None:
            try:
                me = self._member(number)
                for batch in make(me).batches(position):
                    found = [sample for samples, _ in batch.micro_batches if samples for sample in samples]
                    assert len(batch.model_keys) == len(set(batch.model_keys))
                    steps[number].append(found)
                    ends[number] = batch.end
                    me.vote.count = "1" in self._gather(number, str(int(me.vote.count_wanted)))
                    if len(steps[number]) == most:
                        break
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        assert ends == [ends[0]] * self.world_size
        return [sorted(sum(parts, [])) for parts in zip(*steps, strict=True)], ends[0]  # noqa: RUF017

    def _member(self, rank: int) -> Any:
        def gather(text: str) -> list[str]:
            self.gathers += rank == 0
            return self._gather(rank, text)

        nothing = SimpleNamespace(before_data=lambda: None, after_data=lambda: None)
        return SimpleNamespace(
            rank=rank, world_size=self.world_size, seed=3, vote=Vote(), device=torch.device("cpu"),
            gather_text=gather, generators=nothing, should_leave=False,
        )  # fmt: skip

    def _gather(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._barrier.wait()
        found = list(self._texts)
        self._barrier.wait()
        return found


class Numbered:
    """A data shard whose samples say which they are; it learns its epoch as datasets of Hugging Face do."""

    def __init__(self, shard: int, length: int) -> None:
        self.shard, self.length, self.epoch = shard, length, 0

    def set_epoch(self, epoch: int) -> None:
        """Be told the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        return iter([(self.epoch, self.shard, number) for number in range(self.length)])


class Skipping(Numbered):
    """A shard that need not be read up to its cursor."""

    begin = 0

    def skip(self, count: int) -> Skipping:
        """Return the rest."""
        rest = Skipping(self.shard, self.length)
        rest.begin = count
        return rest

    def __iter__(self) -> Iterator[Sample]:
        return iter([(self.epoch, self.shard, number) for number in range(self.begin, self.length)])


def shards_of(lengths: list[int], kind: Any = Numbered) -> shard_loader.DataShards:
    """Return shards of these lengths."""

    def build(shard: int, shards: int) -> Any:
        assert shards == len(lengths)
        return kind(shard, lengths[shard])

    return shard_loader.DataShards(build, len(lengths), kind(0, 0))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    tail=st.sampled_from(["spill", "short"]),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_every_sample_once_through_kills_and_resizes(
    lengths: list[int], tail: str, epochs: int, data: st.DataObject
) -> None:
    """Kills (steps forgotten), other world sizes, batch sizes and micro-batches: each sample of each epoch, once."""
    number = len(lengths)
    parts = data.draw(st.sampled_from([None, *(n for n in range(1, number + 1) if number % n == 0)]))
    position, seen = ShardSchedule(number, 1, epochs=epochs).start, []
    while position.epoch < epochs:
        size = (parts or 1) * data.draw(st.integers(1, 8))
        schedule = ShardSchedule(number, size, epochs=epochs, tail=tail, virtual_shards=parts)
        micro = data.draw(st.sampled_from([None, 1, 3]))

        def make(
            me: Any, schedule: ShardSchedule = schedule, micro: int | None = micro
        ) -> shard_loader.ShardLoader:
            found = shards_of(lengths, Numbered if me.world_size == 1 else Skipping)
            return shard_loader.ShardLoader(me, found, schedule, micro, collate=list, virtual_shards=parts)

        most, is_killed = data.draw(st.integers(1, 10)), data.draw(st.booleans())
        alone, end = Group(1).run(position, most, make)
        group = Group(data.draw(st.integers(1, parts or number)))
        assert (alone, end) == group.run(position, most, make)
        if not is_killed or most > 7:  # else nothing of it was kept
            seen += [sample for step in alone for sample in step]
            position = end
    assert sorted(seen) == [(e, s, i) for e in range(epochs) for s, n in enumerate(lengths) for i in range(n)]


def test_ranks_gather_only_where_a_shard_ends() -> None:
    """Counts are compared in the first step and in those that a shard ends in."""
    schedule = ShardSchedule(4, 8, epochs=1)
    group = Group(2)
    steps, _ = group.run(
        schedule.start,
        1000,
        lambda me: shard_loader.ShardLoader(
            me, shards_of([100, 100, 100, 100]), schedule, None, collate=list
        ),
    )
    assert len(steps) == 50
    assert group.gathers == 2


def test_micro_batches_of_a_rank_and_of_virtual_shards() -> None:
    """A rank's samples are cut into even micro-batches; a virtual shard is one, also if it has nothing left."""
    counts: list[list[int]] = []

    def noted(schedule: ShardSchedule, lengths: list[int], micro: int | None, parts: int | None) -> Any:
        def make(me: Any) -> Any:
            loader = shard_loader.ShardLoader(
                me, shards_of(lengths), schedule, micro, collate=list, virtual_shards=parts
            )

            def batches(position: Position) -> Iterator[Any]:
                for batch in loader.batches(position):
                    found = list(batch.micro_batches)
                    counts.append([count for _, count in found])
                    yield batch._replace(micro_batches=iter(found))

            return SimpleNamespace(batches=batches)

        return make

    schedule = ShardSchedule(2, 10, epochs=1)
    Group(1).run(schedule.start, 9, noted(schedule, [10, 10], 4, None))
    assert counts == [[3, 3, 4], [3, 3, 4]]
    counts.clear()
    schedule = ShardSchedule(2, 4, epochs=1, virtual_shards=2)
    Group(1).run(schedule.start, 9, noted(schedule, [2, 4], None, 2))
    assert counts == [[2, 2], [0, 2]]


def batches_of(
    me: Any,
    shards: shard_loader.DataShards,
    schedule: ShardSchedule,
    position: Position,
    processes: int = 0,
) -> tuple[list[Any], list[Position]]:
    """Return all batches as plain lists, and the positions after them; a worker alone hears its own wish."""
    found, ends = [], []
    loader = shard_loader.ShardLoader(me, shards, schedule, None, num_workers=processes, collate=list)
    for batch in loader.batches(position):
        found += [samples for samples, _ in batch.micro_batches]
        ends.append(batch.end)
        me.vote.count = me.vote.count_wanted
    return found, ends


LENGTHS = (20, 7, 0, 31)


class Drawing(IterableDataset[Any]):
    """A shard that draws for each sample, keeps a shuffle buffer, and splits itself up in torch's loader processes."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        waiting = [(self.shard, number) for number in range(LENGTHS[self.shard])]
        random.shuffle(waiting)
        table = torch.arange(1000.0)
        for _ in range(len(waiting)):
            chosen = waiting.pop(random.randrange(len(waiting)))
            yield chosen, table[5:7] + torch.rand(2), np.random.rand(), torch.tensor(random.random())  # noqa: NPY002


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1, 2])
def test_shuffles_and_noise_are_the_same_wherever_a_run_goes_on(me: Any, processes: int) -> None:
    """Loader processes and resumed runs read the bits that one undisturbed process reads."""
    shards = shard_loader.DataShards(lambda shard, **_: Drawing(shard), 4, Drawing(0))
    schedule = ShardSchedule(4, 12, epochs=2)
    whole, ends = batches_of(me, shards, schedule, schedule.start)
    rest, _ = batches_of(me, shards, schedule, ends[3], processes)
    assert repr(rest) == repr(whole[4:])
    assert sorted(sample[0] for batch in whole for sample in batch) == sorted(
        2 * [(shard, number) for shard in range(4) for number in range(LENGTHS[shard])]
    )


class Lazy:
    """A shard that reads what it skips, when it is asked for what follows: files in a shuffled order, noise on each sample."""

    def __init__(self, shard: int, begin: int = 0) -> None:
        self.shard, self.begin = shard, begin

    def skip(self, count: int) -> Lazy:
        """Return the rest."""
        return Lazy(self.shard, self.begin + count)

    def __iter__(self) -> Iterator[Any]:
        files = random.sample(range(50), 50)
        noisy = ((number, random.random()) for number in files[: LENGTHS[self.shard]])
        return itertools.islice(noisy, self.begin, None)


def test_a_skip_that_returns_nothing_is_refused_by_name() -> None:
    """Such a run trained until its first restart, which failed on an iterator of None."""

    class Moves(list[int]):
        def skip(self, count: int) -> None:
            del self[:count]

    reader = shard_reader.ShardReader(lambda **_: Moves(range(8)), 1, seed=0, size=4, epochs=1)
    with pytest.raises(DatasetError, match=r"skip\(2\) of a data shard returned a NoneType") as refused:
        next(iter(reader.chunks([0], 0, [3])))
    assert "self, if it moves in place" in (refused.value.remedy or "")


@pytest.mark.parametrize("steps", [1, 3])
def test_skipped_samples_leave_what_follows_as_it_was(me: Any, steps: int) -> None:
    """With `skip`, too, a resumed run reads the bits that an undisturbed one reads."""
    shards = shard_loader.DataShards(lambda shard, **_: Lazy(shard), 4, Lazy(0))
    schedule = ShardSchedule(4, 6, epochs=1)
    whole, ends = batches_of(me, shards, schedule, schedule.start)
    rest, _ = batches_of(me, shards, schedule, ends[steps - 1])
    assert repr(rest) == repr(whole[steps:])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Numbered, "data shard 1 ended after 3 samples, and 5 of it had been trained on"),
        (Skipping, "data shard 1 has fewer samples than the 5 of it that had been trained on"),
    ],
)
def test_a_shard_that_became_shorter_is_told(me: Any, kind: Any, message: str) -> None:
    """A shard must have what was trained on; the message says which and how much."""
    schedule = ShardSchedule(2, 4, epochs=1)
    position = schedule.start._replace(cursors=(5, 5))
    with pytest.raises(DatasetError) as told:
        batches_of(me, shards_of([9, 3], kind), schedule, position)
    assert told.value.message == message


def test_another_number_of_shards_is_refused(me: Any) -> None:
    """Cursors of one number of shards mean nothing in another."""
    position = ShardSchedule(4, 4, epochs=1).start
    with pytest.raises(DatasetError) as told:
        batches_of(me, shards_of([9, 3]), ShardSchedule(2, 4, epochs=1), position)
    assert told.value.message == "the position is in 4 data shards, and the dataset is read in 2"


def test_opening_tells_what_is_known(me: Any) -> None:
    """No length, and a fingerprint of the number of shards, of what they are and of what they say themselves."""

    def rows(shard: int, shards: int) -> Iterator[int]:
        yield from range(shard, 100, shards)

    found = shard_loader.open_shards(me, rows, "train", 4)
    (line,) = me.events
    assert (line["event"], line["samples"], line["shards"]) == ("dataset.opened", None, 4)
    assert line["source"].endswith("rows")
    assert line["fingerprint"] == found.fingerprint
    assert found.content.number == 4
    marks = {line["fingerprint"]}
    for build, number in ((lambda **_: [], 4), (lambda **_: [], 8), (lambda shard, **_: Drawing(shard), 4)):
        marks.add(shard_loader.open_shards(me, build, "train", number).fingerprint)
    assert len(marks) == 4


@pytest.mark.parametrize(
    ("build", "world_size", "message"),
    [
        (lambda **_: 7, 1, "dataset.entry returned a int for a data shard, which has no __iter__"),
        (lambda **_: [], 3, "3 workers cannot share 2 data shards"),
    ],
)
def test_unusable_shards_are_refused(me: Any, build: Any, world_size: int, message: str) -> None:
    """What cannot be read is said before anything starts."""
    me.world_size = world_size
    with pytest.raises(DatasetError) as refused:
        shard_loader.open_shards(me, build, "train", 2)
    assert refused.value.message == message


def test_reading_up_to_a_cursor_is_told(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard without `skip` is read again up to its cursor, and the log says how far it is."""
    monkeypatch.setattr(shard_reader, "_REPORT_EVERY_S", 0.0)
    schedule = ShardSchedule(1, 5, epochs=1)
    batches_of(me, shards_of([40]), schedule, schedule.start._replace(cursors=(30,)))
    told = [line for line in me.events if line["event"] == "dataset.passed"]
    assert [(line["shard"], line["samples"]) for line in told] == [(0, 1), (0, 11), (0, 21)]
