"""Samples of the evaluation looked up in the training data."""

# ruff: noqa: NPY002  # the global generator is what datasets draw from
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from elasticflow.runtime.data import overlap
from elasticflow.runtime.data.overlap import Overlap

if TYPE_CHECKING:
    from numpy.typing import NDArray

OWN = np.random.default_rng()
LIMIT_S = 60.0  # far more than any of these takes


class Rows(Dataset[Any]):
    """Samples of the given numbers; each may be made by a function of its number."""

    def __init__(
        self, numbers: Any, make: Any = lambda number: (torch.full((3,), float(number)), number)
    ) -> None:
        self.numbers, self.make, self.reads = list(numbers), make, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.make(self.numbers[index])


class AtOnce(Rows):
    """Reads many at once, as datasets of Hugging Face do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def look(training: Any, evaluation: Any, limit_s: float = LIMIT_S) -> Overlap:
    """Return what is found."""
    return overlap.compare(training, evaluation, limit_s)


@dataclass
class Picture:
    """A sample as a dataclass."""

    pixels: Any


FORMS: dict[str, Any] = {
    "dataclasses": lambda number: Picture(torch.full((3,), float(number))),
    "tensors": lambda number: (torch.full((3,), float(number)), number),
    "arrays": lambda number: {"x": np.full(2, number), "y": [number, "text"]},
    "texts": lambda number: f"line {number}",
    "transformed alike": lambda number: number + torch.rand(3),
    "augmented by numpy": lambda number: number + np.random.rand(3),
}


@pytest.mark.parametrize("kind", [Rows, AtOnce])
@pytest.mark.parametrize("make", FORMS.values(), ids=list(FORMS))
def test_the_same_content_is_found_whatever_it_is(make: Any, kind: Any) -> None:
    """Two in three samples of the evaluation are trained on, in objects that know nothing of each other."""
    found = look(kind(range(40), make), kind(range(20, 80), make))
    assert (found.found, found.looked_up, found.compared, found.samples) == (20, 60, 40, 40)
    assert found.is_leak
    assert found.pair is not None
    assert found.pair[0] + 20 == found.pair[1]
    assert look(kind(range(40), make), kind(range(40, 80), make)).found == 0


@given(
    st.lists(st.integers(0, 30), min_size=1, unique=True),
    st.lists(st.integers(0, 30), min_size=1, unique=True),
)
@settings(max_examples=50)
def test_parts_of_one_set_are_compared_by_number(trained: list[int], measured: list[int]) -> None:
    """All of them, and no sample is read but a few that show that it is one set."""
    one, other = Rows(range(31)), Rows(range(31))
    nested = Subset(Subset(one, list(range(30, -1, -1))), [30 - number for number in trained])
    found = look(nested, Subset(other, measured))
    both = set(trained) & set(measured)
    assert found[:4] == (len(both), len(measured), len(trained), len(trained))
    assert found.is_leak == bool(both and len(both) >= min(2, len(measured)))
    assert one.reads < 20
    assert look(nested, other).found == len(trained)
    assert look(one, Subset(other, measured)).found == len(measured)


def test_parts_of_two_sets_are_compared_by_content() -> None:
    """The same numbers in two sets of one length say nothing."""
    train, test = Subset(Rows(range(50)), range(40)), Subset(Rows(range(100, 150)), range(40))
    assert look(train, test)[:4] == (0, 40, 40, 40)


class Pictures(Rows):
    """Keeps a transform, as datasets of torchvision do; one kind cannot do without."""

    def __init__(self, numbers: Any, transform: Any, *, needs_it: bool = False) -> None:
        super().__init__(numbers)
        self.transform, self.needs_it = transform, needs_it

    def __getitem__(self, index: int) -> Any:
        picture, number = super().__getitem__(index)
        return (self.transform(picture) if self.transform or self.needs_it else picture), number


def test_augmentation_hides_nothing() -> None:
    """Training pictures are augmented and the evaluation's are not: what they are made of is compared."""

    def augment(picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.rand(3)

    train, test = Pictures(range(50), augment), Pictures(range(50), torch.neg)
    assert look(Subset(train, range(40)), Subset(test, range(30, 50))).found == 10
    assert look(Pictures(range(40), augment), test).found == 40
    assert look(Pictures(range(40), augment), Rows(range(30, 50))).found == 10
    assert train.transform is augment
    needy = Pictures(range(50), augment, needs_it=True)
    found = look(needy, test)
    assert (found.found, "drawn at random" in found.doubt) == (0, True)


def test_splits_with_generators_of_their_own_leak() -> None:
    """What A1 was: two permutations of one set."""
    full = TensorDataset(torch.arange(500.0), torch.arange(500))
    train, test = (random_split(full, [400, 100], torch.Generator().manual_seed(i))[i] for i in range(2))
    expected = len(set(train.indices) & set(test.indices))
    assert expected > 50
    assert look(train, test).found == expected
    train, test = random_split(full, [400, 100])
    assert look(train, test).found == 0


@pytest.mark.parametrize(
    ("training", "evaluation", "doubt"),
    [
        (Rows(range(20), lambda n: n + torch.rand(2)), Rows(range(20), lambda n: torch.full((2,), float(n))), "drawn at random"),
        (Rows(range(20)), Rows([0] * 20, lambda _: torch.zeros(3)), "repeat themselves"),
        (Rows([1] * 20), Rows([1, 2, 1, 2] * 5), "repeat themselves"),
        (Rows(range(20), lambda n: (n, object())), Rows(range(20), lambda _: object()), "repeat themselves"),
        (Rows(range(20), lambda n: n + OWN.random()), Rows(range(20)), "read twice"),
    ],
    ids=["augmented", "constant", "few kinds", "no data", "own generator"],
)  # fmt: skip
def test_what_cannot_be_told_is_no_leak(training: Any, evaluation: Any, doubt: str) -> None:
    """Why it cannot is said."""
    found = look(training, evaluation)
    assert (found.found, found.is_leak) == (0, False)
    assert doubt in found.doubt


def test_a_few_twins_are_no_leak() -> None:
    """Real data has them: one in 250 samples, or one sample of many."""
    found = look(Rows(range(1000)), Rows([7, *range(1000, 1249)]))
    assert (found.found, found.looked_up, found.is_leak) == (1, 250, False)
    assert look(Rows(range(1000)), Rows([7, 8, 9, *range(1000, 1247)])).is_leak


def passengers(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return a table of class, sex, age in years and siblings, in which many rows are alike by chance."""
    return np.stack(
        [
            generator.integers(1, 4, count),
            generator.integers(0, 2, count),
            generator.normal(30, 14, count).round().clip(0, 80),
            generator.geometric(0.65, count) - 1,
        ],
        axis=1,
    )


def titles(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return rows of up to four tokens, padded; short ones of frequent tokens are alike."""
    tokens = generator.zipf(1.5, (count, 4)).clip(max=50)
    return np.where(np.arange(4) < generator.integers(1, 5, (count, 1)), tokens, 0).astype(float)


def tensors(rows: NDArray[np.float64]) -> TensorDataset:
    """Return the rows as a dataset that knows nothing of others."""
    return TensorDataset(torch.from_numpy(rows.copy()))


@pytest.mark.parametrize(("make", "count"), [(passengers, 891), (passengers, 5000), (titles, 400)])
@pytest.mark.parametrize("seed", range(3))
def test_twins_that_training_data_has_as_well_are_no_leak(make: Any, count: int, seed: int) -> None:
    """A table split once is no leak though many rows have a twin; two splits of it are, and so is the training data."""
    generator = np.random.default_rng(seed)
    rows = make(generator, count)
    order, other = generator.permutation(count), generator.permutation(count)
    part = count // 5
    training, held_out = tensors(rows[order[part:]]), tensors(rows[order[:part]])
    found = look(training, held_out)
    assert found.found > max(2, found.looked_up // 10)
    assert (found.is_leak, found.is_natural) == (False, True)
    assert found.doubt == "samples repeat themselves in the training data as well"
    assert look(training, tensors(rows[other[:part]])).is_leak
    assert look(training, tensors(rows[order[-part:]])).is_leak


def test_data_half_of_which_repeats_still_leaks() -> None:
    """Of 1,000 training samples 500 are twins of another: an evaluation wholly of them is told, one as they are is not."""
    training = Rows([*range(500), *range(500, 750), *range(500, 750)])
    assert look(training, Rows(range(200))).is_leak
    assert look(training, Rows([*range(100), *range(500, 600)])).is_leak
    assert not look(training, Rows([*range(1000, 1100), *range(500, 600)])).is_leak


def test_it_ends_in_time_and_says_how_far_it_came() -> None:
    """Without time one sample of each is read (and two read again); what was seen counts for the part that it is of."""
    training, evaluation = Rows(range(10_000)), Rows(range(10_000))
    found = look(training, evaluation, 0.0)
    assert (found.looked_up, found.compared, training.reads, evaluation.reads) == (1, 1, 3, 3)
    assert found.found == 1  # both begin with the first
    assert Overlap(2, 256, 500, 1_000_000).is_leak
    assert not Overlap(2, 256, 1_000_000, 1_000_000).is_leak
    partly = look(Rows(range(100_000)), Rows(range(200_000, 200_200)), 0.05)
    assert partly.compared < 100_000
    assert f"{partly.compared:,} of 100,000 training samples were looked at" in partly.doubt


def test_a_large_part_is_spread_over_the_data() -> None:
    """Each number once, and the first tenth lies in all tenths."""
    order = list(overlap._scattered(1000, 1000))
    assert sorted(order) == list(range(1000))
    assert len({number // 100 for number in order[:100]}) == 10
    assert list(overlap._scattered(1, 5)) == [0]


def test_looking_leaves_no_trace() -> None:
    """The generators draw afterwards as if nothing had been read."""

    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = state()
    look(Rows(range(20), lambda n: n + random.random()), Rows(range(9), lambda n: n + np.random.rand()))
    assert state() == before


def test_the_run_says_it_once_and_nothing_where_nothing_is(me: Any) -> None:
    """One event with what was found; data that cannot be read is told by whoever uses it."""
    overlap.warn(me, Rows(range(40)), Rows(range(30, 50)))
    assert me.events == [
        {"event": "overlap.found", "level": "warning", "found": 10, "looked_up": 20, "compared": 40, "samples": 40, "pair": me.events[0]["pair"]}
    ]  # fmt: skip
    me.events.clear()
    overlap.warn(me, Rows(range(40)), Rows(range(40, 50)))
    overlap.warn(me, Rows(range(40), lambda _: 1 // 0), Rows(range(30, 50)))
    assert me.events == []


def test_samples_that_cannot_be_looked_into_say_nothing() -> None:
    """Neither that they repeat themselves, nor that they are in the training data."""
    for make in (lambda _: lambda: 1, lambda number: (number, lambda: 1)):
        found = look(Rows(range(40), make), Rows(range(20, 80), make))
        assert (found.found, found.is_leak, found.doubt) == (
            0,
            False,
            "function in the samples cannot be looked into",
        )
