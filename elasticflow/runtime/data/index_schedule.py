"""Which samples make up which step: a schedule in samples, at any world size.

The stream of samples is endless: place p of it is sample `permutation[n, seed, p // n](p % n)`.
A position is a number of samples, so a run can go on at another world size or another batch size, and
finding the samples of any step costs the same as finding those of the next one.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING, Literal

import numpy as np

from elasticflow.errors import DatasetError
from elasticflow.runtime.process.position import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1  # of the order: a position in a snapshot means the same samples for ever, or is refused

Tail = Literal["spill", "short", "drop"]

_FEW_SAMPLES = 1024  # below this the halves have 5 bits or fewer and 8 rounds mix them too little


class Permutation:
    """A shuffle of `range(samples)` in constant memory: alternating Feistel network with cycle walking.

    The same on every machine and for every version of torch and numpy (golden values in the tests). Each place is equally
    likely for each sample. Not each whole shuffle, though: of eight samples some come a quarter more often than others,
    and of 2**k, k > 3, only every second one (those of even sign) ever comes.

    Args:
        samples: How many there are.
        seed: Of the order.
        epochs: One shuffle for each; several are computed at once, since numpy's cost is per call.
    """

    def __init__(self, samples: int, seed: int, *epochs: int) -> None:
        self.samples = samples
        bits = max(2, (samples - 1).bit_length())
        left, right = bits // 2, bits - bits // 2
        self._right_bits = np.uint64(right)
        self._left_mask = np.uint64((1 << left) - 1)
        self._right_mask = np.uint64((1 << right) - 1)
        self._keys = [
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
        left, right = x >> self._right_bits, x & self._right_mask
        for i, keys in enumerate(self._keys):
            key = keys if len(keys) == 1 else keys[which]
            if i % 2 == 0:
                left ^= _mix(right ^ key) & self._left_mask
            else:
                right ^= _mix(left ^ key) & self._right_mask
        return (left << self._right_bits) | right


def _key(samples: int, seed: int, epoch: int, number: int) -> int:
    digest = blake2b(pack("<QQQQ", samples, seed, epoch, number), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
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
def _permutation(samples: int, seed: int, first: int, last: int) -> Permutation:
    return Permutation(samples, seed, *range(first, last + 1))


class IndexSchedule:
    """Every step of a run, computed when asked for.

    Args:
        samples: Length of the dataset.
        global_batch_size: Samples per step, the same at every world size.
        epochs: Passes over the dataset; or
        steps: Optimizer steps.
        tail: What becomes of samples at an epoch's end that fill no batch: "spill" (the batch goes on in the
            next epoch), "short" (a smaller batch) or "drop" (not trained on in that epoch).
        seed: Seed of the order.

    Raises:
        DatasetError: nothing would ever be trained.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        tail: str = "spill",
        seed: int = 0,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ValueError("needs exactly one of epochs and steps")
        if tail not in ("spill", "short", "drop"):
            raise ValueError(f'tail = "{tail}": must be spill, short or drop')
        if tail == "drop" and samples < global_batch_size:
            raise DatasetError(
                f'the dataset has {samples} samples, fewer than global_batch_size ({global_batch_size}), and tail = "drop" drops them all',
                'use a smaller dataset.global_batch_size, or tail = "short"',
            )
        self.samples, self.global_batch_size, self.seed = samples, global_batch_size, seed
        self.tail: Tail = tail  # type: ignore[assignment]  # checked above
        self._epochs, self._steps = epochs, steps
        self.start = Position(0, 0, 0, 0, is_epoch_end=False)

    @property
    def steps(self) -> int:
        """Steps of the whole run, counted from its start with this batch size."""
        return self.remaining(self.start)

    @property
    def end(self) -> Position:
        """Position after the last step, counted from the start with this batch size."""
        n, size, steps = self.samples, self.global_batch_size, self.steps
        if self._epochs is not None:
            offset = self._epochs * n
            samples = self._epochs * (n // size * size) if self.tail == "drop" else offset
            return Position(steps, offset, self._epochs, samples, is_epoch_end=True)
        if self.tail == "spill":
            offset = samples = steps * size
            return Position(
                steps, offset, offset // n, samples, is_epoch_end=offset // n > (offset - size) // n
            )
        full, rest = divmod(steps, self._steps_per_epoch)
        offset = full * n + rest * size
        samples = offset if self.tail == "short" else steps * size
        return Position(steps, offset, full, samples, is_epoch_end=rest == 0)

    @property
    def _steps_per_epoch(self) -> int:
        n, size = self.samples, self.global_batch_size
        return n // size if self.tail == "drop" else -(-n // size)

    def is_end(self, position: Position) -> bool:
        """True if no step is left after *position*."""
        return self.remaining(position) == 0

    def remaining(self, position: Position) -> int:
        """Return how many steps are left after *position*."""
        if self._steps is not None:
            return max(0, self._steps - position.step)
        assert self._epochs is not None
        n, size = self.samples, self.global_batch_size
        if position.offset >= self._epochs * n:
            return 0
        if self.tail == "spill":
            return -(-(self._epochs * n - position.offset) // size)
        left = n - position.offset % n
        in_this_epoch = left // size if self.tail == "drop" else -(-left // size)
        return in_this_epoch + (self._epochs - position.offset // n - 1) * self._steps_per_epoch

    def batch(self, position: Position) -> tuple[int, int, Position]:
        """Return the next step: offset of its first sample, number of its samples, position after it."""
        n, size, offset = self.samples, self.global_batch_size, position.offset
        left = n - offset % n
        if self.tail == "spill":
            count = size if self._epochs is None else min(size, self._epochs * n - offset)
            after = offset + count
        elif self.tail == "short":
            count = min(size, left)
            after = offset + count
        else:
            if left < size:  # the batch size grew since the snapshot
                offset, left = offset + left, n
            count = size
            after = offset + (left if left - size < size else size)
        end = Position(
            step=position.step + 1,
            offset=after,
            epoch=after // n,
            samples=position.samples + count,
            is_epoch_end=after // n > position.offset // n,
        )
        return offset, count, end

    def indices(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the stream."""
        if not offsets.size:
            return offsets
        n = self.samples
        first, last = int(offsets[0]) // n, int(offsets[-1]) // n
        permutation = _permutation(n, self.seed, first, last)
        if first == last:
            return permutation(offsets - first * n)
        epochs = offsets // n
        return permutation(offsets - epochs * n, epochs - first)
