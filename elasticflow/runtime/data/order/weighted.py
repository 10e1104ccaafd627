"""Samples drawn with replacement, each as often as its weight says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elasticflow.runtime.data.order.order import digest_of, seed_of
from elasticflow.runtime.data.order.permutation import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elasticflow.runtime.data.order.order import OrderRecord

# Version of these rules, in snapshots.
VERSION = 1
# A float64 holds a draw of so many bits exactly.
_BITS = 53


class WeightedOrder:
    """An endless stream of independent draws; an epoch is a number of them.

    The draw at a place is a function of seed and place. One table of 8 bytes per sample is kept; a draw is a search in it.

    Args:
        weights: One per sample: finite, at least 0, not all 0. A sample of weight 0 is never drawn.
        draws: Number of draws in an epoch; None: as many as there are samples.

    Attributes:
        has_repeats: A sample may come more than once in an epoch.
    """

    has_repeats = True

    def __init__(self, weights: NDArray[np.float64], seed: int, draws: int | None = None) -> None:
        self._places = len(weights) if draws is None else draws
        # Sample k is drawn by the numbers from _ends[k - 1] on and below _ends[k]. A running sum, unlike numpy's other
        # sums, is added up in one order on every machine.
        sums = np.cumsum(weights / weights.max(), dtype=np.float64)
        sums /= sums[-1]
        sums *= 2.0**_BITS
        self._ends = sums.astype(np.int64)
        self._keys = [np.uint64(seed_of(seed, "draws", number)) for number in range(2)]
        self.record: OrderRecord = {
            "kind": "weighted",
            "version": VERSION,
            "places": self._places,
            "numbers": digest_of(self._ends),
        }

    def __len__(self) -> int:
        return self._places

    def in_words(self) -> str:
        """Return the total of the weights, in as many draws as there are samples."""
        samples = len(self._ends)
        chances = np.diff(self._ends, prepend=0) / 2.0**_BITS
        # The logarithm of 0, for a sample that is always drawn.
        with np.errstate(divide="ignore"):
            seen = -np.expm1(samples * np.log1p(-chances)).sum()
        return (
            f"of {samples:,} samples, {samples:,} draws with replacement reach some {seen:,.0f}; the one of the largest weight comes "
            f"{samples * chances.max():,.3g} times"
        )

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at places of the endless stream."""
        drawn = mix(mix(places.astype(np.uint64) + self._keys[0]) ^ self._keys[1]) >> np.uint64(64 - _BITS)
        return np.searchsorted(self._ends, drawn.astype(np.int64), side="right").astype(np.int64, copy=False)
