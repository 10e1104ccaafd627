"""Mixtures: exact shares, each set in its own epochs, a function of the place alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.runtime.data.mixture import shares_of
from elasticflow.runtime.data.order.mixed import MOST_SHARE, MixedOrder
from elasticflow.runtime.data.order.permutation import Permutation

SETS = st.lists(st.tuples(st.integers(4, 90), st.integers(1, 50)), min_size=1, max_size=7)


def sets_of(order: MixedOrder, sizes: list[int], places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the set and the number in it of each of the first places."""
    found = order.indices(np.arange(places))
    ends = np.cumsum(sizes)
    sets = np.searchsorted(ends, found, side="right")
    return sets, found - (ends - sizes)[sets]


def test_order_is_the_same_for_ever() -> None:
    """Golden values: a position in a snapshot means these samples on every machine and in every version."""
    order = MixedOrder([5, 3, 9], [5, 3, 2], 7)
    assert order.indices(np.arange(20)).tolist() == GOLDEN
    assert order.indices(np.arange(10**15, 10**15 + 4)).tolist() == FAR


GOLDEN = [7, 0, 6, 2, 4, 5, 6, 1, 3, 15, 10, 1, 0, 3, 5, 4, 9, 2, 0, 3]
FAR = [8, 12, 4, 3]


@settings(max_examples=25)
@given(sets=SETS, seed=st.integers(0, 2**63 - 1), data=st.data())
def test_each_set_in_its_own_epochs(sets: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    """No sample of a set comes again before all others of it have come; what stands at a place follows from the place."""
    sizes, shares = ([pair[i] for pair in sets] for i in (0, 1))
    order, many = MixedOrder(sizes, shares, seed), 1_100
    of_sets, numbers = sets_of(order, sizes, many)
    for number, size in enumerate(sizes):
        drawn = numbers[of_sets == number]
        whole = len(drawn) // size * size
        assert all(sorted(epoch) == list(range(size)) for epoch in drawn[:whole].reshape(-1, size).tolist())
        assert len(set(drawn[whole:].tolist())) == len(drawn) - whole
    places = np.array(sorted(data.draw(st.sets(st.integers(0, many - 1), max_size=40))), dtype=np.int64)
    whole_order = order.indices(np.arange(many))
    assert MixedOrder(sizes, shares, seed).indices(places).tolist() == whole_order[places].tolist()


@settings(max_examples=25)
@given(sets=SETS, epochs=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_shares_are_exact_in_every_epoch(sets: list[tuple[int, int]], epochs: int, seed: int) -> None:
    """Each set's samples in an epoch differ from its share by less than half a sample for each doubling of the sets, and one."""
    sizes, shares = ([pair[i] for pair in sets] for i in (0, 1))
    order = MixedOrder(sizes, shares, seed)
    places = epochs * len(order)
    of_sets, _ = sets_of(order, sizes, places)
    counts = np.bincount(of_sets, minlength=len(sizes))
    expected = np.array(shares) / sum(shares) * places
    assert np.abs(counts - expected).max() <= 0.5 * (len(sizes) - 1).bit_length() + 1e-6
    assert counts.tolist() == order._counts(0, len(order._sizes), places)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_sets_drawn_by_size_come_once_an_epoch(sizes: list[int], seed: int) -> None:
    """Without weights an epoch of the mixture is one of every set, also beyond a block."""
    order = MixedOrder(sizes, shares_of(sizes), seed)
    found = order.indices(np.arange(2 * len(order))).reshape(2, -1)
    assert [sorted(epoch) for epoch in found.tolist()] == [list(range(sum(sizes)))] * 2


def test_sets_come_in_a_shuffled_order() -> None:
    """Two sets of equal shares do not take turns, and many sets are not always beside the same ones."""
    sets, _ = sets_of(MixedOrder([1000, 1000], [1, 1], 1), [1000, 1000], 100_000)
    assert abs(float(np.corrcoef(sets[:-1], sets[1:])[0, 1])) < 0.02
    sets, _ = sets_of(MixedOrder([50] * 64, [1] * 64, 1), [50] * 64, 64 * 400)
    after = sets[1:][sets[:-1] == 7]
    counts = np.bincount(after, minlength=64)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 63 + 5 * np.sqrt(126)


def test_sets_of_one_size_are_shuffled_apart() -> None:
    """Two equal sets do not come in the same order."""
    sets, numbers = sets_of(MixedOrder([500, 500], [1, 1], 1), [500, 500], 1000)
    same = numbers[sets == 0][:400] == numbers[sets == 1][:400]
    assert int(same.sum()) < 10


def test_a_set_with_a_tiny_share_comes_as_rarely_as_that() -> None:
    """One in two hundred thousand: its first sample is not missed, and the counts are right far away."""
    sizes = [10**5, 10, 10**5]
    order = MixedOrder(sizes, [10**5, 1, 10**5], 3)
    sets, _ = sets_of(order, sizes, 250_000)
    assert np.bincount(sets)[1] in {1, 2}
    far = order._counts(0, len(order._sizes), 10**15)
    assert sum(far) == 10**15
    assert abs(far[1] - 10**15 / 200_001) <= 1


def test_large_shares_and_sets_do_not_overflow() -> None:
    """Shares of 50 bits, sets of 10**12 samples, places of 10**15."""
    shares = [MOST_SHARE // 2, MOST_SHARE // 3, 1]
    order = MixedOrder([10**12, 10**12, 1], shares, 5)
    tracemalloc.start()
    found = order.indices(np.arange(10**15, 10**15 + 2_000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counts = np.bincount(np.searchsorted([10**12, 2 * 10**12], found, side="right"), minlength=3)
    expected = np.array(shares) / sum(shares) * 2_000
    assert np.abs(counts - expected).max() <= 50  # of two blocks and parts of two others
    assert most < 1_000_000


@pytest.mark.parametrize("sizes", [[3], [5, 2000, 1, 70], [1024, 1023, 10**15]])
def test_shuffles_together_are_those_one_by_one(sizes: list[int]) -> None:
    """Of any sizes, with few rounds and with many."""
    one_by_one = [Permutation(size, 9, epoch) for epoch, size in enumerate(sizes)]
    which = np.repeat(np.arange(len(sizes)), 40)
    places = np.array([n * 7919 % size for size in sizes for n in range(40)], dtype=np.int64)
    expected = np.concatenate([one_by_one[i](places[which == i]) for i in range(len(sizes))])
    assert Permutation.joined(one_by_one)(places, which).tolist() == expected.tolist()
