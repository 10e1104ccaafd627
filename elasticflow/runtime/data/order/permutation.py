"""A shuffle of any size in constant memory."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
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
        samples: For each shuffle, or one for all of them; so are all arrays.
        right_bits: Number of bits in the right half of a place.
        rounds: The bits of the half that each round changes, and its keys.
    """

    def __init__(self, samples: int, seed: int, *epochs: int) -> None:
        bits = max(2, (samples - 1).bit_length())
        left, right = bits // 2, bits - bits // 2
        masks = [np.array([(1 << half) - 1], dtype=np.uint64) for half in (left, right)]
        self.samples = np.array([samples], dtype=np.uint64)
        self.right_bits = np.array([right], dtype=np.uint64)
        self.rounds = [
            (
                masks[i % 2],
                np.array([_key(samples, seed, epoch, i) for epoch in epochs], dtype=np.uint64),
            )
            for i in range(8 if samples >= _FEW_SAMPLES else 16)
        ]

    @classmethod
    def joined(cls, several: Sequence[Permutation]) -> Permutation:
        """Return shuffles of several sizes, each of one epoch, to be computed at once."""
        made = cls.__new__(cls)
        made.samples = np.concatenate([each.samples for each in several])
        made.right_bits = np.concatenate([each.right_bits for each in several])
        no_round = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
        rows = zip_longest(*(each.rounds for each in several), fillvalue=no_round)
        made.rounds = [
            (np.concatenate([mask for mask, _ in row]), np.concatenate([key for _, key in row]))
            for row in rows
        ]
        return made

    def __call__(
        self, places: NDArray[np.int64], which: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the samples at *places* (one dimension, each in [0, samples)); *which* of the shuffles, if several."""
        if which is None:
            which = np.zeros(len(places), dtype=np.int64)
        x = self._encipher(places.astype(np.uint64), which)
        outside = np.flatnonzero(x >= _of(self.samples, which))
        while outside.size:
            x[outside] = self._encipher(x[outside], which[outside])
            outside = outside[x[outside] >= _of(self.samples, which[outside])]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64], which: NDArray[np.int64]) -> NDArray[np.uint64]:
        bits = _of(self.right_bits, which)
        left, right = x >> bits, x & _of(self.rounds[1][0], which)
        for i, (masks, keys) in enumerate(self.rounds):
            half, other = (left, right) if i % 2 == 0 else (right, left)
            half ^= mix(other ^ _of(keys, which)) & _of(masks, which)
        joined: NDArray[np.uint64] = (left << bits) | right
        return joined


def _of(numbers: NDArray[np.uint64], which: NDArray[np.int64]) -> NDArray[np.uint64]:
    return numbers if len(numbers) == 1 else numbers[which]


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
