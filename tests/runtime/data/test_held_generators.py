"""Generators that a dataset holds: a library's are seeded for each sample, its own are named."""

from __future__ import annotations

import random
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elasticflow.runtime.data import held_generators, index_loader, overlap
from elasticflow.runtime.data.fingerprint import look_at
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.process.random_streams import Generators

PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


class Pictures:
    """Augments one picture."""

    def __init__(self, augment: Any) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.augment(PICTURE + index)


def read(dataset: Any, order: list[int]) -> dict[int, Any]:
    """Return samples read in this order, by a reader of its own."""
    generators = Generators(1, torch.device("cpu"))
    generators.rest()
    reader = SampleReader(dataset, list, 5, generators=generators)
    return {index: reader.read(index, [index])[0] for index in order}


def require_seeded(dataset: Any) -> None:
    """The samples are the same in whatever order they are read, differ from each other, and do not vary."""
    one, other = read(dataset, [0, 1, 2, 3, 4, 5]), read(dataset, [4, 2, 5, 0, 3, 1])
    assert all(np.array_equal(one[index], other[index]) for index in range(6))
    assert len({(sample - PICTURE - index).tobytes() for index, sample in one.items()}) > 1
    assert look_at(dataset).varying is None
    assert overlap.compare(dataset, dataset, 5.0).doubt != "a sample read twice is not the same"


class Noise:
    """Stands in for a transform of albumentations (2.0.8): its interface is two generators that it makes itself."""

    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(), random.Random()

    def __call__(self, picture: Any) -> Any:
        """Return the picture, changed or not."""
        shift = self.random_generator.integers(9) if self.py_random.random() < 0.5 else 0
        return picture + shift


class FromGlobal:
    """Stands in for an augmenter of imgaug (0.4.0): it draws from the generator of `imgaug.random.get_global_rng()`."""

    def __call__(self, picture: Any) -> Any:
        """Return the picture, changed."""
        return picture + sys.modules["imgaug.random"].get_global_rng().generator.integers(9)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names of both libraries, and of imgaug the function that gives its generator."""
    shared = SimpleNamespace(generator=np.random.Generator(np.random.SFC64()))
    imgaug = ModuleType("imgaug.random")
    imgaug.get_global_rng = lambda: shared  # type: ignore[attr-defined]
    for name in ("albumentations", "imgaug"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "imgaug.random", imgaug)
    monkeypatch.setattr(Noise, "__module__", "albumentations.core")


GLOBAL = Noise()


def by_global_name(picture: Any) -> Any:
    """Augment by what the module holds."""
    return GLOBAL(picture)


@pytest.mark.usefixtures("stand_ins")
def test_generators_of_libraries_are_seeded_for_each_sample() -> None:
    """Wherever the dataset has the transform from."""
    noise = Noise()
    for augment in (
        noise,
        FromGlobal(),
        by_global_name,
        [noise.__call__][0],
        partial(lambda picture, steps: steps[0](picture), steps=[Noise(), Noise()]),
    ):
        require_seeded(Pictures(augment))


@pytest.mark.usefixtures("stand_ins", "real_processes")
def test_loader_processes_seed_them_as_well(me: Any) -> None:
    """The same samples as read by the worker itself, and from the middle on."""
    schedule = IndexSchedule(6, 2, epochs=2, seed=3)
    seen = []
    for processes, start in (
        (0, schedule.start),
        (2, schedule.start),
        (1, schedule.batch(schedule.start)[2]),
    ):
        loader = index_loader.IndexLoader(me, Pictures(Noise()), schedule, None, num_workers=processes)
        seen.append([batch for step in loader.batches(start) for batch, _ in step.micro_batches])
    assert all(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[0][1:], seen[2]))


@pytest.mark.usefixtures("stand_ins")
def test_transforms_draw_apart_from_each_other() -> None:
    """Two in one dataset do not draw the same numbers."""
    one, other = Noise(), Noise()
    held = held_generators.of_libraries(Pictures([one, other]))
    for each in held:
        each.seed(3)
    assert one.random_generator.random() != other.random_generator.random()
    assert one.py_random.random() != other.py_random.random()


@pytest.mark.usefixtures("stand_ins")
def test_a_generator_of_the_datasets_own_is_left_alone() -> None:
    """It is named, and what it draws is not the same when it is read again."""
    rng = np.random.default_rng(0)
    dataset = Pictures(lambda picture: picture + rng.integers(10**6))
    assert [each.path for each in held_generators.held_by(dataset)] == ["dataset.augment.rng"]
    assert [each.path for each in held_generators.of_libraries(dataset)] == ["imgaug.random"]
    assert look_at(dataset).varying is not None


def test_nothing_is_imported_or_looked_for_without_a_library() -> None:
    """Neither is installed where most jobs run."""
    if not held_generators.LIBRARIES.keys() & sys.modules.keys():
        assert held_generators.of_libraries(Pictures(Noise())) == []
    assert held_generators.LIBRARIES.keys() == {"albumentations", "imgaug"}


def test_albumentations_itself() -> None:
    """The library, where it is installed."""
    library = pytest.importorskip("albumentations")
    flips = library.Compose([library.HorizontalFlip(p=0.5), library.GaussNoise(p=1)])
    require_seeded(Pictures(lambda picture: flips(image=picture)["image"]))


def test_imgaug_itself() -> None:
    """The library, where it is installed."""
    augmenters = pytest.importorskip("imgaug.augmenters")
    noise = augmenters.Sequential([augmenters.Fliplr(0.5), augmenters.Add((-9, 9))])
    require_seeded(Pictures(lambda picture: noise(image=picture)))
