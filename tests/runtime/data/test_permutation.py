"""The permutation behind the order of samples: golden values, the same in plain integers, and how well it shuffles."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticflow.runtime.data.order.permutation import Permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray


def test_permutation_is_the_same_for_ever() -> None:
    """Golden values, made by a scalar implementation: a run can be resumed by a later version on another machine."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [8, 0, 3, 4, 7, 6, 2, 1, 5, 9]
    assert Permutation(2000, 1234, 1)(np.arange(8)).tolist() == [1064, 1915, 278, 76, 1658, 1087, 945, 881]
    far = np.array([0, 1, 10**15 - 1])
    assert Permutation(10**15, 7, 3)(far).tolist() == [982997537233234, 803990189167413, 974617104808029]


class Scalar:
    """The permutation once more, one place at a time, in integers without a width, and backwards too."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self.samples = samples
        bits = max(2, (samples - 1).bit_length())
        self.left, self.right = bits // 2, bits - bits // 2
        self.keys = [
            int.from_bytes(
                blake2b(b"".join(x.to_bytes(8, "little") for x in (samples, seed, epoch, i)), digest_size=8).digest(),
                "little",
            )
            for i in range(8 if samples >= 1024 else 16)
        ]  # fmt: skip

    def sample(self, place: int) -> int:
        """Return the sample at *place*."""
        return self._walk(place, list(enumerate(self.keys)))

    def place(self, sample: int) -> int:
        """Return where *sample* is."""
        return self._walk(sample, list(enumerate(self.keys))[::-1])

    def _walk(self, x: int, rounds: list[tuple[int, int]]) -> int:
        while True:
            left, right = x >> self.right, x % 2**self.right
            for i, key in rounds:
                if i % 2 == 0:
                    left ^= self._mix(right ^ key) % 2**self.left
                else:
                    right ^= self._mix(left ^ key) % 2**self.right
            x = left << self.right | right
            if x < self.samples:
                return x

    @staticmethod
    def _mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31


SEEDS, EPOCHS = st.integers(0, 2**63 - 1), st.integers(0, 10**6)


@settings(max_examples=12)
@given(samples=st.integers(1, 10**6), seed=SEEDS, epoch=EPOCHS)
@example(samples=1, seed=0, epoch=0)
@example(samples=2**16, seed=1, epoch=0)
@example(samples=2**16 + 1, seed=1, epoch=0)
@example(samples=10**6, seed=1, epoch=0)
def test_permutation_is_bijective(samples: int, seed: int, epoch: int) -> None:
    """Each sample has one place, whatever the number of samples."""
    found = Permutation(samples, seed, epoch)(np.arange(samples))
    assert np.array_equal(np.ones(samples), np.bincount(found, minlength=samples))


@settings(max_examples=25)
@given(samples=st.integers(1, 10**12), seed=SEEDS, epochs=st.tuples(EPOCHS, EPOCHS), data=st.data())
def test_permutation_is_what_integers_without_a_width_give(
    samples: int, seed: int, epochs: tuple[int, int], data: st.DataObject
) -> None:
    """All at once or one by one, in any integer type and byte order: the same samples, and the way back from each."""
    places = data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=8))
    first, second = (Scalar(samples, seed, epoch) for epoch in epochs)
    expected = [first.sample(place) for place in places]
    permutation = Permutation(samples, seed, epochs[0])
    dtypes = ["<i8", ">i8", "<u8", ">u8", *(["<i4", ">i4"] if samples <= 2**31 else [])]
    for dtype in dtypes:
        found = permutation(np.array(places, dtype=dtype))
        assert (expected, np.dtype(np.int64)) == (found.tolist(), found.dtype)
    assert [first.place(sample) for sample in expected] == places
    both = Permutation(samples, seed, *epochs)(np.repeat(places, 2), np.tile([0, 1], len(places)))
    assert (expected, [second.sample(place) for place in places]) == (both[::2].tolist(), both[1::2].tolist())


def test_permutation_of_very_many_samples_repeats_none() -> None:
    """200,000 of 10**12 places, next to each other and far apart: no sample twice, none from outside."""
    places = np.concatenate([np.arange(10**5), np.linspace(10**6, 10**12 - 1, 10**5, dtype=np.int64)])
    found = Permutation(10**12, 5, 9)(places)
    assert len(places) == len(np.unique(found))
    assert 0 <= found.min() < found.max() < 10**12


def excess(counts: NDArray[np.int64], expected: float, constraints: int = 1) -> float:
    """Return by how many standard deviations the chi-square of *counts* exceeds that of pure chance."""
    freedom = counts.size - constraints
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("samples", [1000, 1024, 1025, 20_000, 200_003])
def test_permutation_shuffles(samples: int) -> None:
    """Neighbours do not stay neighbours, blocks spread over all blocks, and epochs and seeds differ, as by chance."""
    shuffles = [
        Permutation(samples, seed, epoch)(np.arange(samples)) for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    first = shuffles[0]
    for other in (first[1:], *shuffles[1:], np.arange(samples)):
        assert abs(np.corrcoef(first[: len(other)], other)[0, 1]) < 4 / np.sqrt(samples)
    blocks = 30
    spread = np.bincount(
        np.arange(samples) * blocks // samples * blocks + first * blocks // samples, minlength=blocks**2
    )
    assert excess(spread, samples / blocks**2, 2 * blocks - 1) < 4


@pytest.mark.parametrize("samples", [5, 10, 35, 100, 1025])
def test_every_sample_comes_first_equally_often(samples: int) -> None:
    """Over seeds, and over epochs of one seed, each sample is as often the first one as any other."""
    draws = 40 * samples
    over_epochs = Permutation(samples, 3, *range(draws))(np.zeros(draws, dtype=np.int64), np.arange(draws))
    of_seeds = np.concatenate(
        [Permutation(samples, seed, 0)(np.zeros(1, dtype=np.int64)) for seed in range(300)]
    )
    assert excess(np.bincount(over_epochs, minlength=samples), 40) < 4
    assert excess(np.bincount(of_seeds * 5 // samples, minlength=5), 300 / 5) < 4


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_every_shuffle_of_a_few_samples_comes_equally_often(samples: int) -> None:
    """Up to five samples no order of them is preferred; of eight, some of the 40,320 come a quarter more often."""
    shuffles, epochs = math.factorial(samples), 200
    seeds = max(10, shuffles // 2)
    places, which = np.tile(np.arange(samples), epochs), np.repeat(np.arange(epochs), samples)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(seeds):
        orders = Permutation(samples, seed, *range(epochs))(places, which).reshape(epochs, samples)
        found.update(map(tuple, orders.tolist()))
    assert shuffles == len(found)
    assert excess(np.array(list(found.values())), seeds * epochs / shuffles) < 4
