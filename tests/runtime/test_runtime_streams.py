"""Random generators: who draws is noticed, who does not pays nothing, and both read the same data."""

# ruff: noqa: NPY002  # the global generator is what datasets draw from
from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from elasticflow.runtime import data, streams
from elasticflow.runtime.order import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "randint": lambda: random.randint(0, 7),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "gauss": lambda: random.gauss(0, 1),
    "numpy rand": np.random.rand,
    "numpy normal": lambda: np.random.normal(size=3),
    "numpy integers": lambda: np.random.randint(2, size=1),
    "numpy choice": lambda: np.random.choice([1, 2]),
    "numpy seed": lambda: np.random.seed(5),
    "a thousand": lambda: [random.random() for _ in range(312 * 3)],
}


@pytest.fixture
def generators() -> streams.Generators:
    """Return generators at rest."""
    made = streams.Generators(7, torch.device("cpu"))
    made.rest()
    return made


def test_draws_can_be_seen_here(generators: streams.Generators) -> None:
    """On this Python and numpy the words that move are where they are expected; else every step would pay."""
    assert not generators.are_used


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_any_draw_is_noticed(generators: streams.Generators, draw: Callable[[], object]) -> None:
    """Whatever is drawn from either global generator is seen by the next look, and for ever."""
    assert not generators.look()
    draw()
    assert generators.look()
    generators.rest()
    assert generators.look()


def test_torch_does_not_count(generators: streams.Generators) -> None:
    """Torch's generator is seeded for each key anyway."""
    torch.rand(3)
    assert not generators.look()


def test_rest_is_the_same_state_whatever_came_before(generators: streams.Generators) -> None:
    """What is drawn first after a rest depends on the seed alone."""
    first = random.random(), np.random.normal()
    other = streams.Generators(7, torch.device("cpu"))
    np.random.normal()
    other.rest()
    assert first == (random.random(), np.random.normal())


class DrawsLate:
    """Draws for samples from 10 on."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index < 10:
            return index, 0.0, 0.0, 0.0
        return index, random.random(), float(np.random.normal()), float(torch.rand(()))


def test_a_dataset_that_begins_to_draw_reads_what_one_that_is_always_seeded_reads(me: Any) -> None:
    """Being noticed only at the first draw changes nothing that is read."""
    schedule = Schedule(20, 4, epochs=2, seed=3)

    def read(*, seeded: bool) -> list[Any]:
        own = streams.Generators(11, torch.device("cpu"))
        own.rest()
        own.are_used = seeded
        reader = SimpleNamespace(**{**vars(me), "generators": own})
        loader = data.Loader(reader, DrawsLate(), schedule, 2, collate=list)  # type: ignore[arg-type]
        found = [list(batch.micro_batches) for batch in loader.batches(schedule.start)]
        assert own.are_used
        return found

    assert read(seeded=True) == read(seeded=False)
