"""Random generators: who draws is noticed, and who does not pays nothing."""

# ruff: noqa: NPY002  # the global generator is what datasets draw from
from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from elasticflow.runtime.process import random_streams

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

TORCH_DRAWS: dict[str, Callable[[], object]] = {
    "torch rand": lambda: torch.rand(()),
    "torch randn": lambda: torch.randn(2),
    "torch randperm": lambda: torch.randperm(3),
    "torch bernoulli": lambda: torch.bernoulli(torch.tensor(0.5)),
    "torch one round": lambda: torch.rand(624),
}


@pytest.fixture
def generators() -> random_streams.Generators:
    """Return generators at rest."""
    made = random_streams.Generators(7, torch.device("cpu"))
    made.rest()
    return made


def test_draws_can_be_seen_here(generators: random_streams.Generators) -> None:
    """On this Python and numpy the words that move are where they are expected; else every step would pay."""
    assert not generators.are_used


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_any_draw_is_noticed(generators: random_streams.Generators, draw: Callable[[], object]) -> None:
    """Whatever is drawn from either global generator is seen by the next look, and for ever."""
    assert not generators.look()
    draw()
    assert generators.look()
    generators.rest()
    assert generators.look()


def test_torch_does_not_count(generators: random_streams.Generators) -> None:
    """Torch's generator is seeded for each forward anyway."""
    torch.rand(3)
    assert not generators.look()


@pytest.mark.parametrize("draw", [*DRAWS.values(), *TORCH_DRAWS.values()], ids=[*DRAWS, *TORCH_DRAWS])
def test_any_draw_of_a_dataset_is_seen(
    generators: random_streams.Generators, draw: Callable[[], object]
) -> None:
    """Whatever a dataset draws is seen, and says nothing about the model."""
    generators.before_data()
    assert not generators.have_moved()
    draw()
    assert generators.have_moved()
    generators.after_data()
    assert not generators.have_moved()
    assert not generators.look()


def test_a_normal_deviate_kept_from_before_is_not_drawn(generators: random_streams.Generators) -> None:
    """What a forward left behind for the next draw would be drawn without a trace, and depend on that forward."""
    draws: list[Callable[[], float]] = [
        lambda: random.gauss(0, 1),
        np.random.normal,
        lambda: float(torch.randn(())),
    ]
    for draw in draws:
        draw()
        generators.before_data()
        first = draw()
        assert generators.have_moved()
        generators.before_data()
        assert first == draw()


def test_what_a_model_drew_before_data_is_read_counts(generators: random_streams.Generators) -> None:
    """A forward between two readings of data is not lost sight of."""
    generators.seed_model(3)
    random.random()
    generators.before_data()
    assert generators.look()


def test_in_the_step_of_the_first_draws_each_forward_draws_the_same(
    generators: random_streams.Generators,
) -> None:
    """Until all ranks know of it: so nothing depends on which rank does which forward, and after which others."""
    found = []
    for key in (3, 4):
        generators.seed_model(key)
        found.append((random.random(), np.random.normal()))
    assert found[0] == found[1]
    assert generators.look()
    generators.seed_model(5)
    assert (random.random(), np.random.normal()) != found[0]


def test_numpy_and_torch_draw_different_numbers(generators: random_streams.Generators) -> None:
    """Both are Mersenne twisters: from equal seeds they would have equal words."""
    generators.are_used = True
    generators.seed_model(12345678912345)
    assert np.random.randint(2**32, dtype=np.uint64) != int(torch.randint(2**32, ()))


def test_rest_is_the_same_state_whatever_came_before(generators: random_streams.Generators) -> None:
    """What is drawn first after a rest depends on the seed alone."""
    first = random.random(), np.random.normal()
    other = random_streams.Generators(7, torch.device("cpu"))
    np.random.normal()
    other.rest()
    assert first == (random.random(), np.random.normal())
