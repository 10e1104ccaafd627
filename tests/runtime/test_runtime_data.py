"""Datasets checked and identified, batches read in order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from elasticflow.errors import DatasetError
from elasticflow.runtime import data, dataset
from elasticflow.runtime.order import Schedule

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
        (Rows(20), 30, "dataset.samples = 30, but the Rows has 20"),
    ],
)
def test_unusable_datasets_are_refused(me: Any, found: Any, samples: int | None, message: str) -> None:
    """What cannot be trained on is said in the job file's words before anything starts."""
    with pytest.raises(DatasetError) as refused:
        data.open_dataset(me, lambda: found, "train", samples)
    assert refused.value.message == message


def test_opening_logs_what_was_opened(me: Any) -> None:
    """Rank 0 says which data it is, and the fingerprint is kept for the snapshot."""
    data.open_dataset(me, Rows, "train")
    (line,) = me.events
    assert (line["event"], line["name"], line["samples"]) == ("dataset.opened", "train", 20)
    assert line["fingerprint"] == me.fingerprints["train"]


def test_ranks_with_different_data_are_refused(me: Any) -> None:
    """A node that sees other files is named."""
    me.gather_text = lambda text: [text, "other"]
    with pytest.raises(DatasetError, match="rank 1 opened other data for `train` than rank 0"):
        data.open_dataset(me, Rows, "train")


def test_fingerprint_tells_data_apart_and_leaves_no_trace() -> None:
    """Length and content count; reading for it draws nothing from the global generators."""
    state = torch.get_rng_state()
    assert dataset.fingerprint(Rows(20)) == dataset.fingerprint(Rows(20)) != dataset.fingerprint(Rows(21))
    assert dataset.fingerprint([torch.zeros(3)]) != dataset.fingerprint([torch.ones(3)])
    assert dataset.fingerprint(Rows(20, draws=True)) == dataset.fingerprint(Rows(20, draws=True))
    assert torch.equal(state, torch.get_rng_state())


def test_fingerprint_of_its_own_wins() -> None:
    """A dataset may know better what identifies it."""
    rows = Rows()
    rows.fingerprint = "v7"  # type: ignore[attr-defined]
    assert dataset.fingerprint(rows) == "v7"


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("processes", [0, 1])
def test_batches_follow_the_schedule(me: Any, processes: int) -> None:
    """Two ranks together read each global batch, in micro-batches of even size, from any position."""
    schedule = Schedule(20, 7, epochs=2, seed=3)
    seen: dict[int, list[int]] = {}
    sizes = set()
    for rank in (0, 1):
        me.rank, me.world_size = rank, 2
        loader = data.Loader(me, Rows(), schedule, 2, processes=processes)
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
@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_dataset_draws_depends_on_the_step_alone(me: Any, processes: int) -> None:
    """A run resumed at step 2 reads the same augmented samples as one that was never interrupted."""
    schedule = Schedule(20, 8, epochs=2, seed=3)
    loader = data.Loader(me, Rows(draws=True), schedule, 3, processes=processes)
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
        data.prepare(me, lambda: calls.append(1))
    assert calls == [1]
