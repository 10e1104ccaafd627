"""Samples of several sets in fixed shares, each set in its own epochs."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elasticflow.runtime.data.order.order import seed_of
from elasticflow.runtime.data.order.permutation import Permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elasticflow.runtime.data.order.order import OrderRecord

# Version of these rules, in snapshots.
VERSION = 1
MOST_SHARE = 1 << 50  # of all shares together: products with a place of a block fit 64 bits
_BLOCK = 1024
_BLOCKS_KEPT = 64
_SHUFFLES_KEPT = 256  # besides four of each set


class _Block(NamedTuple):
    """One block: for each place the set, and the sample's place in that set's endless stream."""

    sets: NDArray[np.int64]
    numbers: NDArray[np.int64]


class MixedOrder:
    """An endless stream made of each set's endless stream; a set's samples come once per epoch of the set.

    Among the first places of the stream, each set has its share to within a sample or so (two sets: half a sample; each
    doubling of the sets adds up to half a sample more). In which order the sets come is shuffled in blocks of 1,024 places.
    How many samples of a set stand before a block follows from the block's number, so nothing is counted and no state kept.

    Args:
        shares: How often each set is drawn, as whole numbers that count relative to their sum (at most 2**50).
    """

    has_repeats = True

    def __init__(self, sizes: Sequence[int], shares: Sequence[int], seed: int) -> None:
        self._sizes, self._shares = tuple(sizes), tuple(shares)
        # Samples that make an epoch of the mixture.
        self._places = sum(sizes)
        self._lengths = np.array(sizes, dtype=np.int64)
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._below = list(accumulate(shares, initial=0))
        self._seeds = [seed_of(seed, "set", number) for number in range(len(sizes))]
        self._shuffle_seed = seed_of(seed, "sets of a block")
        self.record: OrderRecord = {
            "kind": "mixed",
            "version": VERSION,
            "places": self._places,
            "sets": list(self._sizes),
            "shares": list(self._shares),
        }
        self._shuffle = lru_cache(maxsize=_SHUFFLES_KEPT + 4 * len(sizes))(self._made_shuffle)
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._made_block)

    def __len__(self) -> int:
        return self._places

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the endless stream, the sets' samples numbered one set after another."""
        if not places.size:
            return places
        sets, numbers = np.empty(len(places), dtype=np.int64), np.empty(len(places), dtype=np.int64)
        low = 0
        while low < len(places):
            epoch, place = divmod(int(places[low]), self._places)
            begin = epoch * self._places + place // _BLOCK * _BLOCK
            end = min(begin + _BLOCK, (epoch + 1) * self._places)
            high = int(np.searchsorted(places, end))
            block, inside = self._block(begin, end - begin), places[low:high] - begin
            sets[low:high], numbers[low:high] = block.sets[inside], block.numbers[inside]
            low = high
        return self._samples(sets, numbers)

    def _samples(self, sets: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, of_set = np.divmod(numbers, self._lengths[sets])
        most = int(epochs.max()) + 1
        pairs, which = np.unique(sets * most + epochs, return_inverse=True)
        shuffles = Permutation.joined([self._shuffle(*divmod(pair, most)) for pair in pairs.tolist()])
        return self._starts[sets] + shuffles(of_set, which)

    def _made_shuffle(self, number: int, epoch: int) -> Permutation:
        return Permutation(self._sizes[number], self._seeds[number], epoch)

    def _made_block(self, begin: int, size: int) -> _Block:
        sets = np.empty(size, dtype=np.int64)
        starts = np.zeros(len(self._sizes), dtype=np.int64)
        self._assign(0, len(self._sizes), begin, np.arange(size, dtype=np.int64), sets, starts)
        sets = sets[Permutation(size, self._shuffle_seed, begin)(np.arange(size, dtype=np.int64))]
        # The samples of a set in the order of their places: none comes again before all others have come.
        by_set = np.argsort(sets, kind="stable")
        in_order = sets[by_set]
        rank = np.arange(size, dtype=np.int64) - np.searchsorted(in_order, in_order)
        numbers = np.empty(size, dtype=np.int64)
        numbers[by_set] = starts[in_order] + rank
        return _Block(sets, numbers)

    def _assign(
        self,
        low: int,
        high: int,
        begin: int,
        places: NDArray[np.int64],
        sets: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        """Have the sets from *low* to *high* share *places*, the next ones of theirs after *begin* places of theirs."""
        if high - low == 1 or not places.size:
            sets[places] = low
            starts[low:high] = self._counts(low, high, begin)
            return
        middle = (low + high) // 2
        share, whole = self._below[middle] - self._below[low], self._below[high] - self._below[low]
        # The lower half has p * share / whole, rounded, of the first p places; p is Python's, so that nothing overflows.
        before, rest = divmod(2 * begin * share + whole, 2 * whole)
        counts = (rest + 2 * share * np.arange(len(places) + 1, dtype=np.int64)) // (2 * whole)
        is_lower = np.diff(counts) > 0
        self._assign(low, middle, before, places[is_lower], sets, starts)
        self._assign(middle, high, begin - before, places[~is_lower], sets, starts)

    def _counts(self, low: int, high: int, begin: int) -> list[int]:
        """Return how many of the first *begin* places of the sets from *low* to *high* each of these sets has."""
        if high - low == 1:
            return [begin]
        middle = (low + high) // 2
        share, whole = self._below[middle] - self._below[low], self._below[high] - self._below[low]
        before = (2 * begin * share + whole) // (2 * whole)
        return [*self._counts(low, middle, before), *self._counts(middle, high, begin - before)]
