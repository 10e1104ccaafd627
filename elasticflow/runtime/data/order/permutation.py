"""A shuffle of any size in constant memory."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FEW_SAMPLES = 1024  # below this the halves have 5 bits or fewer and 8 rounds mix them too little


class Permutation:
    """A shuffle of `range(samples)` in constant memory: alternating Feistel network with cycle walking.

    The same on every machine and for every version of torch and numpy (golden values in the tests). Each place is equally
    likely for each sample. Not each whole shuffle, though: of eight samples some come a quarter more often than others,
    and of 2**k, k > 3, only every second one (those of even sign) ever comes.

    Args:
        epochs: One shuffle for each; several are computed at once, since numpy's cost is per call.

    Attributes:
        right_bits: Number of bits in the right half of a place.
        left_mask: Selects the bits of a left half.
        right_mask: Mask of the right half.
        keys: For each round, that of each epoch.
    """

    def __init__(self, samples: int, seed: int, *epochs: int) -> None:
        self.samples = samples
        bits = max(2, (samples - 1).bit_length())
        left, right = bits // 2, bits - bits // 2
        self.right_bits = np.uint64(right)
        self.left_mask = np.uint64((1 << left) - 1)
        self.right_mask = np.uint64((1 << right) - 1)
        self.keys = [
            np.array([_key(samples, seed, epoch, i) for epoch in epochs], dtype=np.uint64)
            for i in range(8 if samples >= _FEW_SAMPLES else 16)
        ]

    def __call__(
        self, places: NDArray[np.int64], which: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the samples at *places* (one dimension, each in [0, samples)); *which* of the epochs, if several."""
        if which is None:
            which = np.zeros(len(places), dtype=np.int64)
        x = self._encipher(places.astype(np.uint64), which)
        outside = np.flatnonzero(x >= self.samples)
        while outside.size:
            x[outside] = self._encipher(x[outside], which[outside])
            outside = outside[x[outside] >= self.samples]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64], which: NDArray[np.int64]) -> NDArray[np.uint64]:
        left, right = x >> self.right_bits, x & self.right_mask
        for i, keys in enumerate(self.keys):
            key = keys if len(keys) == 1 else keys[which]
            if i % 2 == 0:
                left ^= mix(right ^ key) & self.left_mask
            else:
                right ^= mix(left ^ key) & self.right_mask
        return (left << self.right_bits) | right


class Permutations:
    """Shuffles of several sizes, each of one epoch, computed at once; each is what `Permutation` gives.

    Args:
        permutations: At least one, each of one epoch.
    """

    def __init__(self, permutations: Sequence[Permutation]) -> None:
        self._samples = np.array([each.samples for each in permutations], dtype=np.uint64)
        self._right_bits = np.array([each.right_bits for each in permutations])
        self._left_mask = np.array([each.left_mask for each in permutations])
        self._right_mask = np.array([each.right_mask for each in permutations])
        rounds = max(len(each.keys) for each in permutations)
        keys = [
            [each.keys[i][0] if i < len(each.keys) else 0 for each in permutations] for i in range(rounds)
        ]
        self._keys = np.array(keys, dtype=np.uint64)
        # The fewest rounds of any, and for those after it, which shuffles have them.
        self._has_round = [np.array([i < len(each.keys) for each in permutations]) for i in range(rounds)]

    def __call__(self, places: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at *places*, each in the shuffle that *which* names."""
        x = self._encipher(places.astype(np.uint64), which)
        outside = np.flatnonzero(x >= self._samples[which])
        while outside.size:
            x[outside] = self._encipher(x[outside], which[outside])
            outside = outside[x[outside] >= self._samples[which[outside]]]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64], which: NDArray[np.int64]) -> NDArray[np.uint64]:
        bits, left_mask, right_mask = (
            each[which] for each in (self._right_bits, self._left_mask, self._right_mask)
        )
        left, right = x >> bits, x & right_mask
        for i, keys in enumerate(self._keys):
            key, has_round = keys[which], self._has_round[i]
            half, other, mask = (left, right, left_mask) if i % 2 == 0 else (right, left, right_mask)
            if not has_round.all():
                mask = np.where(has_round[which], mask, np.uint64(0))
            half ^= mix(other ^ key) & mask
        joined: NDArray[np.uint64] = (left << bits) | right
        return joined


def _key(samples: int, seed: int, epoch: int, number: int) -> int:
    digest = blake2b(pack("<QQQQ", samples, seed, epoch, number), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of splitmix64 of *x*, which is overwritten: temporaries are most of the time."""
    x += _ADD
    x ^= x >> _BY_30
    x *= _FIRST
    x ^= x >> _BY_27
    x *= _SECOND
    x ^= x >> _BY_31
    return x


_ADD, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BY_30, _BY_27, _BY_31 = map(np.uint64, (30, 27, 31))


@lru_cache(maxsize=8)
def permutation_of(samples: int, seed: int, first: int, last: int) -> Permutation:
    """Return the shuffles of the epochs from *first* to *last*."""
    return Permutation(samples, seed, *range(first, last + 1))


def permuted(samples: int, seed: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples at ascending places of an endless stream in which each epoch has a shuffle of its own."""
    if not places.size:
        return places
    first, last = int(places[0]) // samples, int(places[-1]) // samples
    permutation = permutation_of(samples, seed, first, last)
    if first == last:
        return permutation(places - first * samples)
    epochs = places // samples
    return permutation(places - epochs * samples, epochs - first)
