"""Datasets checked and identified, batches read in order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from elasticflow.errors import DatasetError
from elasticflow.runtime.data import dataset, index_loader
from elasticflow.runtime.data.fingerprint import fingerprint_of
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process import failure

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rows:
    """A dataset of numbers, optionally with something random in each sample."""

    def __init__(self, length: int = 20, *, draws: bool = False) -> None:
        self.length, self.draws = length, draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.draws:
            return index, torch.rand(2), np.random.rand(), random.random()  # noqa: NPY002
        return index


class Broken(Rows):
    """Fails at one sample."""

    def __init__(self, at: int) -> None:
        super().__init__(16)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        return index // (self.at - index) if index == self.at else index


class BrokenAtOnce(Broken):
    """Reads many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class NoLength:
    """Readable by index, without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """An iterable dataset."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("found", "samples", "message"),
    [
        (NoLength(), None, "dataset.entry returned a NoLength, which has no length"),
        (Stream(), None, "dataset.entry returned a Stream, which cannot be read by index"),
        (7, None, "dataset.entry returned a int, which cannot be read by index"),
        (Rows(0), None, "dataset.entry returned a Rows without samples"),
        (np.float32(3), None, "dataset.entry returned a float32, which has no length"),
        (
            {"train": Rows(), "test": Rows()},
            None,
            "dataset.entry returned a dict, which has no samples by number but the keys train, test",
        ),
        (
            (torch.zeros(20, 3), np.zeros(20)),
            None,
            "dataset.entry returned a tuple of 2 arrays of 20 rows: by index, that is 2 samples",
        ),
        (Rows(20), 30, "dataset.samples = 30, but the Rows has 20"),
    ],
)
def test_unusable_datasets_are_refused(me: Any, found: Any, samples: int | None, message: str) -> None:
    """What cannot be trained on is said in the job file's words before anything starts."""
    with pytest.raises(DatasetError) as refused:
        index_loader.open_dataset(me, lambda: found, "train", samples)
    assert refused.value.message == message


@pytest.mark.parametrize("found", [NoLength(), Stream(), 7, Rows(0), {"train": Rows(20), "test": Rows(10)}])
def test_what_a_script_gave_is_refused_in_words_of_the_script(me: Any, found: Any) -> None:
    """Where no job file names the data, no message speaks of its keys."""
    with pytest.raises(DatasetError) as refused:
        index_loader.open_dataset(me, lambda: found, "train", given_to="run.batches")
    assert refused.value.message.startswith(f"run.batches was given a {type(found).__name__}")
    assert "dataset." not in str(refused.value)


def test_opening_logs_what_was_opened(me: Any) -> None:
    """Rank 0 says which data it is, and the fingerprint is kept for the snapshot."""
    data = index_loader.open_dataset(me, Rows, "train")
    (line,) = me.events
    assert (line["event"], line["name"], line["samples"]) == ("dataset.opened", "train", 20)
    assert line["fingerprint"] == data.fingerprint


def test_ranks_with_different_data_are_refused(me: Any) -> None:
    """A node that sees other files is named."""
    me.gather_text = lambda text: [text, text and "other"]
    with pytest.raises(DatasetError, match="rank 1 opened other data for `train` than rank 0"):
        index_loader.open_dataset(me, Rows, "train")


def test_fingerprint_tells_data_apart_and_leaves_no_trace() -> None:
    """Length and content count; reading for it draws nothing from the global generators."""
    state = torch.get_rng_state()
    assert fingerprint_of(Rows(20)) == fingerprint_of(Rows(20)) != fingerprint_of(Rows(21))
    assert fingerprint_of([torch.zeros(3)]) != fingerprint_of([torch.ones(3)])
    assert fingerprint_of(Rows(20, draws=True)) == fingerprint_of(Rows(20, draws=True))
    assert torch.equal(state, torch.get_rng_state())


def test_arrays_and_lists_are_told_apart_by_content() -> None:
    """Nearly all of them is looked at where that takes no time, and equal content is equal."""

    def columns(at: int) -> list[Any]:
        numbers = np.arange(3000.0)
        numbers[at] = -1
        tensor = torch.from_numpy(numbers)
        return [numbers, tensor, tensor.bfloat16(), TensorDataset(tensor, tensor), list(numbers[:250])]

    for first, again, other in zip(columns(77), columns(77), columns(78), strict=True):
        assert fingerprint_of(first) == fingerprint_of(again) != fingerprint_of(other)


def test_large_arrays_are_looked_at_in_part() -> None:
    """At most 65,536 rows or 4 MiB, the last one among them."""
    many, wide = np.zeros(10**6, np.int8), torch.zeros(64, 2**18)
    before = fingerprint_of(many), fingerprint_of(wide)
    many[-1] = wide[-1, -1] = 1
    assert before[0] != fingerprint_of(many)
    assert before[1] != fingerprint_of(wide)


def test_objects_that_are_no_data_count_by_their_class() -> None:
    """Addresses in memory differ between ranks; what stands beside such an object still counts."""
    odd = [(number, Rows()) for number in range(3)]
    assert fingerprint_of(odd) == fingerprint_of([(number, Rows()) for number in range(3)])
    assert fingerprint_of(odd) != fingerprint_of([(number + 1, Rows()) for number in range(3)])
    texts = np.array([["a", Rows()], ["b", Rows()]], dtype=object)
    assert fingerprint_of(texts) == fingerprint_of(np.array([["a", Rows()], ["b", Rows()]], dtype=object))


def test_a_dataset_that_cannot_be_read_is_told_by_sample(me: Any) -> None:
    """Before anything starts, with the user's own error."""
    with pytest.raises(ZeroDivisionError) as failed:
        index_loader.open_dataset(me, lambda: Broken(15), "train")
    assert failed.value.__notes__ == [f"while reading sample 15 of {__name__}.Broken"]


def test_fingerprint_of_its_own_wins() -> None:
    """A dataset may know better what identifies it."""
    rows = Rows()
    rows.fingerprint = "v7"  # type: ignore[attr-defined]
    assert fingerprint_of(rows) == "v7"


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
def test_batches_follow_the_schedule(me: Any, processes: int) -> None:
    """Two ranks together read each global batch, in micro-batches of even size, from any position."""
    schedule = IndexSchedule(20, 7, epochs=2, seed=3)
    seen: dict[int, list[int]] = {}
    sizes = set()
    for rank in (0, 1):
        me.rank, me.world_size = rank, 2
        loader = index_loader.IndexLoader(me, Rows(), schedule, 2, num_workers=processes)
        for batch in loader.batches(schedule.start):
            micro_batches = list(batch.micro_batches)
            assert len(micro_batches) == len(batch.model_keys)
            sizes |= {count for _, count in micro_batches}
            seen.setdefault(batch.end.step, []).extend(int(i) for rows, _ in micro_batches for i in rows)
    assert sizes == {1, 2}
    in_order = schedule.indices(np.arange(40)).tolist()
    assert [sorted(seen[step]) for step in sorted(seen)] == [
        sorted(in_order[i : i + 7]) for i in range(0, 40, 7)
    ]


@pytest.mark.usefixtures("real_processes")
def test_what_is_due_at_the_beginning_comes_before_loader_processes(me: Any) -> None:
    """They share the place in a file that the dataset has open: nobody else may read there beside them."""
    before: list[int] = []
    me.moments.beginning.append(lambda: before.append(len(psutil.Process().children())))
    schedule = IndexSchedule(20, 7, epochs=1, seed=3)
    already = len(psutil.Process().children())
    for processes in (0, 2):
        loader = index_loader.IndexLoader(me, Rows(), schedule, None, num_workers=processes)
        for batch in loader.batches(schedule.start):
            list(batch.micro_batches)
    assert [already] == before


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
def test_each_step_has_its_own_samples_though_those_of_the_one_before_were_not_all_read(
    me: Any, processes: int
) -> None:
    """A script may catch what its forward raises, such as a lack of memory, and go on with the next step."""
    schedule = IndexSchedule(20, 8, epochs=1, seed=3)
    loader = index_loader.IndexLoader(me, Rows(), schedule, 2, num_workers=processes)
    whole = [[data.tolist() for data, _ in batch.micro_batches] for batch in loader.batches(schedule.start)]
    found = [next(batch.micro_batches)[0].tolist() for batch in loader.batches(schedule.start)]
    assert [first for first, *_ in whole] == found


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_dataset_draws_depends_on_the_step_alone(me: Any, processes: int) -> None:
    """A run resumed at step 2 reads the same augmented samples as one that was never interrupted."""
    schedule = IndexSchedule(20, 8, epochs=2, seed=3)
    loader = index_loader.IndexLoader(me, Rows(draws=True), schedule, 3, num_workers=processes)
    whole = [list(batch.micro_batches) for batch in loader.batches(schedule.start)]
    position = schedule.batch(schedule.batch(schedule.start)[2])[2]
    torch.manual_seed(99)
    rest = [list(batch.micro_batches) for batch in loader.batches(position)]
    assert len(rest) == len(whole) - 2
    for mine, its in zip(whole[2:], rest, strict=True):
        for (first, _), (second, _) in zip(mine, its, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_prepare_runs_once_per_node(me: Any) -> None:
    """Local rank 0 prepares the data; the others only wait."""
    calls: list[int] = []
    for local_rank in (0, 1):
        me.local_rank = local_rank
        index_loader.prepare_data(me, lambda: calls.append(1))
    assert calls == [1]


PLAIN: dict[str, Any] = {
    "list": [float(i) for i in range(20)],
    "array": np.arange(20.0),
    "rows of an array": np.arange(20.0).reshape(20, 1),
    "tensor": torch.arange(20.0),
    "tensors": TensorDataset(torch.arange(20.0)),
}


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("kind", list(PLAIN))
def test_anything_indexable_is_a_dataset(me: Any, kind: str, processes: int) -> None:
    """Lists, arrays and tensors as they are."""
    opened = index_loader.open_dataset(me, lambda: PLAIN[kind], "train")
    schedule = IndexSchedule(20, 6, epochs=1, seed=3)
    seen: list[float] = []
    for batch in index_loader.IndexLoader(me, opened, schedule, None, num_workers=processes).batches(
        schedule.start
    ):
        for made, count in batch.micro_batches:
            rows = made[0] if isinstance(made, list) else made
            assert len(rows) == count
            seen += rows.reshape(-1).tolist()
    assert sorted(seen) == list(range(20))


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("kind", [Broken, BrokenAtOnce])
def test_an_error_of_a_dataset_names_the_sample(me: Any, kind: type[Broken], processes: int) -> None:
    """Wherever it is read, alone or with others, with the user's own error and traceback."""
    schedule = IndexSchedule(16, 5, epochs=1, seed=3)
    loader = index_loader.IndexLoader(me, kind(7), schedule, None, num_workers=processes)
    with pytest.raises(ZeroDivisionError) as failed:
        _ = [list(batch.micro_batches) for batch in loader.batches(schedule.start)]
    assert failed.value.__notes__ == [f"while reading sample 7 of {__name__}.{kind.__name__}"]
    assert "return index // (self.at - index)" in failure.text(failed.value)


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (torch.zeros(4), "sample 7 is (float32 (4,), int), but sample FIRST is (float32 (3,), int)"),
        ("text", "sample 7 is (str, int), but sample FIRST is (float32 (3,), int)"),
        (
            {"a": [1, 2]},
            "sample 7 is ({a: list of 2: int, ...}, int), but sample FIRST is (float32 (3,), int)",
        ),
    ],
)
def test_samples_that_make_no_batch_are_named(me: Any, odd: Any, what: str) -> None:
    """With what they are: index, types and shapes."""
    rows = [(odd if i == 7 else torch.zeros(3), 1) for i in range(16)]
    schedule = IndexSchedule(16, 16, epochs=1, seed=3)
    (batch,) = index_loader.IndexLoader(me, rows, schedule, None).batches(schedule.start)
    first = schedule.indices(np.arange(1))[0]
    with pytest.raises((RuntimeError, TypeError, AttributeError)) as failed:
        list(batch.micro_batches)
    (note,) = failed.value.__notes__
    assert note == "while making a batch of 16 samples of list: " + what.replace("FIRST", str(first))


@pytest.mark.parametrize(
    ("mark", "samples", "what"),
    [
        ("b", 20, "fingerprint b, not a"),
        ("a", 21, "21 samples, not 20"),
        ("b", 21, "fingerprint b, not a and 21 samples, not 20"),
    ],
)
def test_other_data_than_the_snapshots_is_refused(mark: str, samples: int, what: str) -> None:
    """Another content, or another length under the same fingerprint: a position would mean other samples."""
    dataset.require_same({"train": "a", "evaluation": "c"}, {"train": "a", "evaluation": "d"}, 20, 20)
    with pytest.raises(DatasetError) as refused:
        dataset.require_same({"train": mark}, {"train": "a"}, samples, 20)
    assert refused.value.message == f"the data of `train` is not what the snapshot was trained on: {what}"


def test_the_random_state_of_data_is_set_where_it_is_opened(me: Any) -> None:
    """Training data, evaluation and what prepares them begin in one state, whatever ran before."""
    drawn: list[float] = []

    def draws() -> list[int]:
        drawn.append(random.random())
        return [1, 2, 3]

    index_loader.prepare_data(me, draws)
    for name in ("train", "evaluation"):
        random.seed(name)
        index_loader.open_dataset(me, draws, name)
    assert len(drawn) == 3
    assert len(set(drawn)) == 1
