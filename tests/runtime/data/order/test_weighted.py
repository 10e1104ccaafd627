"""Draws by weights: their statistics, and that they are a function of the place."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.runtime.data.order.weighted import WeightedOrder

MANY = 400_000


def frequencies(weights: list[float], seed: int = 1, count: int = MANY) -> np.ndarray:
    """Return how often each sample is drawn in the first places."""
    drawn = WeightedOrder(np.array(weights), seed).indices(np.arange(count))
    return np.bincount(drawn, minlength=len(weights))


def test_draws_are_the_same_for_ever() -> None:
    """Golden values: a position in a snapshot means these samples on every machine and in every version."""
    order = WeightedOrder(np.array([1.0, 2.0, 0.0, 3.5]), 7)
    assert order.indices(np.arange(16)).tolist() == GOLDEN
    assert order.indices(np.array([10**15, 10**15 + 1])).tolist() == FAR


GOLDEN = [1, 3, 3, 0, 1, 1, 0, 1, 1, 3, 0, 0, 0, 3, 3, 1]
FAR = [1, 3]


def test_samples_come_as_often_as_their_weights_say() -> None:
    """Chi-squared of 50 samples with weights over four decades; several seeds, each within 5 deviations."""
    weights = np.logspace(-3, 1, 50)
    expected = weights / weights.sum() * MANY
    for seed in range(5):
        found = frequencies(weights.tolist(), seed)
        chi2 = float(((found - expected) ** 2 / expected).sum())
        assert abs(chi2 - 49) < 5 * np.sqrt(2 * 49)


def test_draws_next_to_one_another_are_independent() -> None:
    """Pairs of neighbouring draws come as often as the product of their shares says."""
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    drawn = WeightedOrder(weights, 3).indices(np.arange(MANY))
    shares = weights / weights.sum()
    for distance in (1, 2, 64):
        pairs = np.bincount(drawn[:-distance] * 4 + drawn[distance:], minlength=16)
        expected = np.outer(shares, shares).reshape(-1) * (MANY - distance)
        assert float(((pairs - expected) ** 2 / expected).sum()) < 15 + 5 * np.sqrt(30)


def test_a_sample_without_weight_is_never_drawn() -> None:
    """Also the first, the last, and several in a row."""
    found = frequencies([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])
    assert np.flatnonzero(found).tolist() == [1, 4]
    assert frequencies([0.0, 0.0, 5.0]).tolist() == [0, 0, MANY]


def test_weights_of_any_size_keep_their_shares() -> None:
    """The largest and the smallest numbers there are: neither overflows nor loses its digits."""
    for scale in (1e308, 1.0, 1e-300):
        assert frequencies([scale, scale / 4], 5, 1000).tolist() == frequencies([4.0, 1.0], 5, 1000).tolist()


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 2**63 - 1),
    places=st.lists(st.integers(0, 10**15), min_size=1, max_size=30),
)
def test_a_draw_follows_from_its_place_alone(weights: list[float], seed: int, places: list[int]) -> None:
    """Whatever is asked for with it; and only samples with a weight are drawn."""
    order = WeightedOrder(np.array(weights), seed)
    together = order.indices(np.array(sorted(places)))
    assert together.tolist() == [int(order.indices(np.array([place]))[0]) for place in sorted(places)]
    assert all(weights[sample] > 0 for sample in together)


def test_other_seeds_draw_otherwise() -> None:
    """Two jobs with one data set do not walk through it alike."""
    first, second = (WeightedOrder(np.ones(1000), seed).indices(np.arange(1000)) for seed in (1, 2))
    assert int((first == second).sum()) < 20


def test_a_table_of_eight_bytes_per_sample_is_all_that_stays() -> None:
    """Memory at a million samples, and where an epoch is as long as anything."""
    tracemalloc.start()
    order = WeightedOrder(np.ones(1_000_000), 1, draws=10**15)
    stays, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stays < 8_100_000
    assert len(order) == 10**15


def test_what_weights_come_to_is_told() -> None:
    """In words, for --deep."""
    assert WeightedOrder(np.array([1.0, 0.0, 1.0, 0.0]), 1).in_words() == (
        "of 4 samples, 4 draws with replacement reach some 2; the one of the largest weight comes 2 times"
    )
