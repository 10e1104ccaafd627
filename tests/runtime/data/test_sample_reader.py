"""Samples read under their own random streams, whoever reads them."""

# ruff: noqa: NPY002  # the global generator is what datasets draw from
from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.loader_processes import LoaderProcesses
from elasticflow.runtime.data.sample_reader import EVALUATION, SampleReader
from elasticflow.runtime.data.step_plan import StepPlan
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.shard_layout import ShardLayout
from elasticflow.runtime.training.evaluation import Evaluation
from tests.runtime.positions import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": np.random.normal,
    "torch": lambda: float(torch.randn(())),
    "all": lambda: random.gauss(0, 1) + float(np.random.rand()) + float(torch.rand(())),
    "many of torch": lambda: float(torch.rand(700).sum()),
}
SAMPLES = 23


class Noisy:
    """Draws for samples from *since* on, and counts how often each was read."""

    def __init__(self, draw: Callable[[], float], since: int = 0) -> None:
        self.draw, self.since = draw, since
        self.reads = [0] * SAMPLES

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads[index] += 1
        return index, self.draw() if index >= self.since else 0.0


class NoisyAtOnce(Noisy):
    """Read many at once, where all draw in turn."""

    def __init__(self, draw: Callable[[], float], since: int = 0) -> None:
        super().__init__(draw, since)
        self.calls: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.calls.append(len(indices))
        return [self[index] for index in indices]


def reader_of(dataset: Any, collate: Any = list, seed: int = 7, use: int = 0) -> SampleReader:
    """Return a reader with generators of its own."""
    generators = random_streams.Generators(seed, torch.device("cpu"))
    generators.rest()
    return SampleReader(dataset, collate, seed, use=use, generators=generators)


def read_all(
    dataset: Any, size: int, *, world_size: int = 1, micro: int | None = None, epochs: int = 2
) -> dict[tuple[int, int], Any]:
    """Return what every sample was read as, by epoch and index, at such sizes; each rank is a process of its own."""
    schedule = IndexSchedule(SAMPLES, size, epochs=epochs, seed=3)
    found: dict[tuple[int, int], Any] = {}
    for rank in range(world_size):
        plan = StepPlan(schedule, micro, layout=ShardLayout(world_size, rank), seed=7)
        reader = reader_of(dataset())
        for step in plan.after(schedule.start):
            for place, indices in step.reads:
                torch.rand(3), random.random()  # a forward
                for at, sample in enumerate(reader.read(place, indices)):
                    found[(place + at) // SAMPLES, sample[0]] = sample[1]
    return found


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
@pytest.mark.parametrize("kind", [Noisy, NoisyAtOnce])
@pytest.mark.parametrize("since", [0, 20])
def test_a_sample_is_the_same_whoever_reads_it_in_which_batch(
    draw: Callable[[], float], kind: type[Noisy], since: int
) -> None:
    """World size, batch size, micro-batches, when the first draw is noticed: nothing of it is in the sample."""
    expected = read_all(partial(kind, draw, since), SAMPLES)
    assert len(expected) == 2 * SAMPLES
    for size, world_size, micro in ((4, 1, None), (5, 3, None), (7, 2, 2), (23, 4, 1)):
        assert expected == read_all(partial(kind, draw, since), size, world_size=world_size, micro=micro)


def test_every_sample_of_every_epoch_has_its_own_stream() -> None:
    """In a batch across the epoch's edge too: the sample's own epoch counts."""
    found = read_all(partial(Noisy, random.random), 10, epochs=3)
    assert len(set(found.values())) == 3 * SAMPLES


def test_seed_and_use_make_other_streams() -> None:
    """Another job's, and an evaluation's on the same dataset."""
    dataset = Noisy(random.random)
    found = [
        reader_of(dataset, seed=seed, use=use).read(0, [1])[0][1]
        for seed, use in ((7, 0), (8, 0), (7, EVALUATION))
    ]
    assert len(set(found)) == 3


def test_who_draws_nothing_is_read_once() -> None:
    """No sample is read twice, and many at once stay so."""
    plain = NoisyAtOnce(random.random, since=SAMPLES)
    read_all(lambda: plain, 8, epochs=1)
    assert plain.reads == [1] * SAMPLES
    assert plain.calls == [8, 8, 7]


def test_who_draws_is_read_again_in_one_batch_only() -> None:
    """The one in which it is noticed; from then on samples are read one by one."""
    noisy = NoisyAtOnce(random.random)
    read_all(lambda: noisy, 8, epochs=1)
    assert sorted(noisy.reads) == [1] * 15 + [3] * 8
    assert noisy.calls == [8, 8] + [1] * SAMPLES


def test_only_generators_drawn_from_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that draws from torch pays for torch alone."""
    seeded: list[int] = []
    monkeypatch.setattr(random_streams, "_seed_python", seeded.append)
    reader = reader_of(Noisy(DRAWS["torch"]))
    seeded.clear()
    for place in range(0, SAMPLES - 4, 4):
        reader.read(place, list(range(place, place + 4)))
    assert seeded == []


def test_what_collate_draws_depends_on_its_samples_alone() -> None:
    """Where they stand and how many they are; the samples, which draw too, stay the same, though collate changes them."""

    def masked(samples: list[list[float]]) -> list[list[float]]:
        for sample in samples:
            sample.append(float(torch.rand(())))
        return samples

    class Lists(Noisy):
        def __getitem__(self, index: int) -> Any:
            return list(super().__getitem__(index))

    for since in (0, SAMPLES):
        first, second = (reader_of(Lists(random.random, since), masked) for _ in range(2))
        expected = {place: first.read(place, [place, place + 1]) for place in (0, 2, 4)}
        assert [len(sample) for batch in expected.values() for sample in batch] == [3] * 6
        assert expected == {place: second.read(place, [place, place + 1]) for place in (4, 0, 2)}


class RunsOut(list[int]):
    """Its samples come from an iterator, which ends."""

    def __getitem__(self, index: Any) -> Any:
        return index, next(iter([0] if index < 2 else []))


class RunsOutNoisy(Noisy):
    """The same, and it draws."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), next(iter([0] if index < 2 else []))


@pytest.mark.parametrize("dataset", [RunsOut(range(4)), RunsOutNoisy(random.random)])
def test_stopiteration_of_a_dataset_or_of_collate_leaves_out_no_sample(dataset: Any) -> None:
    """It would end the loop that reads the samples, or goes through the batches: the rest would be left out unseen."""
    reader = reader_of(dataset)
    assert len(reader.read(0, [0, 1])) == 2
    with pytest.raises(DatasetError) as told:
        reader.read(2, [1, 2, 3])
    name = f"{__name__}.{type(dataset).__name__}"
    assert told.value.message == f"StopIteration was raised while reading sample 2 of {name}"
    with pytest.raises(DatasetError, match="StopIteration was raised while making a batch of 2 samples"):
        reader_of(dataset, collate=lambda _: next(iter([]))).read(0, [0, 1])


def test_other_numbers_of_samples_than_were_asked_for_are_refused() -> None:
    """A dataset that reads many at once might give one for an index that comes twice."""

    class Once(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in dict.fromkeys(indices)]

    reader = reader_of(Once(range(4)))
    assert reader.read(0, [2, 1]) == [2, 1]
    with pytest.raises(DatasetError, match="Once returned 2 samples for 3 indices"):
        reader.read(2, [1, 2, 1])


def test_reading_leaves_the_model_its_resting_state() -> None:
    """Noisy data does not make the model's generators look used, and they rest when it is done."""
    generators = random_streams.Generators(7, torch.device("cpu"))
    generators.rest()
    first = random.random()
    generators.rest()
    reader = SampleReader(Noisy(DRAWS["all"]), list, 7, generators=generators)
    reader.read(0, [1, 2])
    assert not generators.look()
    assert first == random.random()


@settings(max_examples=25)
@given(data=st.data(), size=st.integers(1, 9), epochs=st.integers(1, 2))
def test_changes_of_everything_keep_samples_and_streams(data: st.DataObject, size: int, epochs: int) -> None:
    """Batch size, world size and micro-batches change at will, loaders are ahead: each sample once, always the same."""
    expected = read_all(partial(Noisy, random.random), size, epochs=epochs)
    found: dict[tuple[int, int], float] = {}
    schedule = IndexSchedule(SAMPLES, size, epochs=epochs, seed=3)
    position = schedule.start
    while not schedule.is_end(position):
        schedule = IndexSchedule(SAMPLES, data.draw(st.integers(1, 30)), epochs=epochs, seed=3)
        world_size, micro = data.draw(st.integers(1, 4)), data.draw(st.none() | st.integers(1, 5))
        ranks = [
            StepPlan(schedule, micro, layout=ShardLayout(world_size, r), seed=7).after(position)
            for r in range(world_size)
        ]
        readers = [reader_of(Noisy(random.random)) for _ in ranks]
        for _ in range(data.draw(st.integers(1, 5))):
            for plan, reader in zip(ranks, readers, strict=True):
                step = next(plan, None)
                for place, indices in step.reads if step else []:
                    for at, (index, drawn) in enumerate(reader.read(place, indices)):
                        key = (place + at) // SAMPLES, index
                        assert key not in found
                        found[key] = drawn
                position = step.end if step else position
    assert expected == found


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("draw", [DRAWS["all"], DRAWS["torch"]], ids=["all", "torch"])
def test_loader_processes_read_the_same(draw: Callable[[], float]) -> None:
    """As many as there are, each noticing for itself."""

    def batches() -> Iterator[tuple[int, list[int]]]:
        return ((place, list(range(place, place + 4))) for place in range(0, 20, 4))

    dataset = Noisy(draw, since=6)
    here = reader_of(dataset)
    expected = [here.read(place, indices) for place, indices in batches()]
    for number in (1, 2):
        reader = SampleReader(dataset, list, 7)
        wait: Any = SimpleNamespace(go_on=lambda: None, end=lambda: None)
        found = LoaderProcesses(reader, dataset, batches(), number, pins_memory=False, wait=wait)
        assert expected == list(found)


def test_an_evaluation_reads_each_sample_alike_in_any_batches(me: Any) -> None:
    """So metrics over noisy data are those of any world size; and again the same at the next evaluation."""
    found = []
    schedule = IndexSchedule(SAMPLES, 4, epochs=1)
    for size in (23, 4, 4):
        evaluation = Evaluation(
            me, nn.Identity(), lambda _, batch: batch[1].mean(), Noisy(DRAWS["all"]), schedule, batch_size=size, uses_loss=False
        ).alone()  # fmt: skip
        found += [evaluation.run(end_of(schedule))["loss"] for _ in range(2)]
        assert not me.generators.look()
    assert found == pytest.approx([found[0]] * 6)
    assert len(set(found[2:])) == 1
