"""Batches of samples of similar length, each sample once per epoch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elasticflow.runtime.data.order.order import digest_of, seed_of
from elasticflow.runtime.data.order.permutation import Permutation, permuted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from elasticflow.runtime.data.order.order import OrderRecord

# Version of these rules, in snapshots.
VERSION = 1
# A window is sorted as a whole. Wide windows make lengths in a batch more similar; several windows in an epoch make other batches in each epoch.
_BATCHES_OF_WINDOW = 100
_LEAST_WINDOWS = 2
_SAMPLES_OF_WINDOW = 1 << 22
_WINDOWS_KEPT = 4
_SAMPLES_LOOKED_AT = 1 << 16
_SMALL_TYPES = (np.uint8, np.uint16, np.uint32)


class _Layout(NamedTuple):
    """Parts of an epoch: places before its first whole batch, whole batches, and their windows."""

    head: int
    batches: int
    windows: int


class BucketedOrder:
    """Each epoch is shuffled, cut into windows of up to 100 batches, and each window sorted by length and cut into batches.

    The batches of a window come in an order of their own, and so do the samples of a batch. Places that make no whole batch,
    at an epoch's ends, hold what the shuffle puts there: no length is left out more often than another. One number per sample
    is kept, in as few bytes as it needs, and some windows.

    Args:
        batch: Samples of one step: the order depends on it.
        tail: "spill": batches resume from one epoch into the next; else an epoch begins with a batch.
    """

    has_repeats = False

    def __init__(self, lengths: NDArray[np.float64], batch: int, *, tail: str, seed: int) -> None:
        self._lengths = _in_few_bytes(lengths)
        self._batch, self._seed, self._spills = batch, seed, tail == "spill"
        self.record: OrderRecord = {
            "kind": "bucketed",
            "version": VERSION,
            "places": len(lengths),
            "numbers": digest_of(self._lengths),
            "batch": batch,
            "tail": tail,
        }
        self._window = lru_cache(maxsize=_WINDOWS_KEPT)(self._sorted_window)

    def __len__(self) -> int:
        return len(self._lengths)

    def in_words(self) -> str:
        """Return how much batches of similar length save, as the first ones of an epoch show it."""
        count = min(len(self), max(self._batch, _SAMPLES_LOOKED_AT))
        places = np.arange(count, dtype=np.int64)
        like, plain = (
            self._padding(samples)
            for samples in (self.indices(places), permuted(len(self), self._seed, places))
        )
        return (
            f"of what a batch of {self._batch:,} holds when it is padded to its longest sample, {like:.0%} is padding; "
            f"{plain:.0%} in a plain shuffle"
        )

    def _padding(self, samples: NDArray[np.int64]) -> float:
        lengths = self._lengths[samples].astype(np.float64)
        batches = [lengths[begin : begin + self._batch] for begin in range(0, len(lengths), self._batch)]
        padded = sum(batch.max() * len(batch) for batch in batches)
        return float(1 - lengths.sum() / padded) if padded else 0.0

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the endless stream."""
        if not places.size:
            return places
        samples = len(self)
        first, last = int(places[0]) // samples, int(places[-1]) // samples
        cuts = np.searchsorted(places, [epoch * samples for epoch in range(first, last + 2)]).tolist()
        parts = [
            self._of_epoch(epoch, places[low:high])
            for epoch, low, high in zip(range(first, last + 1), cuts, cuts[1:], strict=False)
            if low < high
        ]
        return np.concatenate(parts)

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        layout, begin = self._layout(epoch), epoch * len(self)
        low = begin + layout.head
        high = low + layout.batches * self._batch
        head, end = np.searchsorted(places, [low, high]).tolist()
        found = np.empty(len(places), dtype=np.int64)
        for part in (slice(head), slice(end, None)):
            found[part] = permuted(len(self), self._seed, places[part])
        for window, low_of, high_of in self._windows(layout, places[head:end] - low):
            inside = slice(head + low_of, head + high_of)
            first = low + _begin(layout, window) * self._batch
            found[inside] = self._window(epoch, window)[places[inside] - first]
        return found

    def _layout(self, epoch: int) -> _Layout:
        samples, batch = len(self), self._batch
        head = min(samples, -(epoch * samples) % batch) if self._spills else 0
        batches = (samples - head) // batch
        most = min(_BATCHES_OF_WINDOW, max(1, _SAMPLES_OF_WINDOW // batch), max(1, batches // _LEAST_WINDOWS))
        return _Layout(head, batches, -(-batches // most))

    def _windows(self, layout: _Layout, places: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yield each window that *places*, counted from the first whole batch, lie in, and which of them do."""
        low = 0
        while low < len(places):
            window = _window_of(layout, int(places[low]) // self._batch)
            end = _begin(layout, window + 1) * self._batch
            high = int(np.searchsorted(places, end))
            yield window, low, high
            low = high

    def _sorted_window(self, epoch: int, window: int) -> NDArray[np.int64]:
        layout, batch = self._layout(epoch), self._batch
        first, last = (_begin(layout, number) for number in (window, window + 1))
        begin = epoch * len(self) + layout.head
        samples = permuted(
            len(self), self._seed, np.arange(begin + first * batch, begin + last * batch, dtype=np.int64)
        )
        # Samples of one length stay in the order of the shuffle.
        by_length = np.argsort(self._lengths[samples], kind="stable").reshape(last - first, batch)
        # Within a batch the shuffle's order, too: else the last worker's samples would always be the longest.
        by_length.sort(axis=1)
        shuffle = Permutation(last - first, seed_of(self._seed, f"batches of window {window}"), epoch)
        return samples[by_length[shuffle(np.arange(last - first, dtype=np.int64))].reshape(-1)]


def _begin(layout: _Layout, window: int) -> int:
    """Return the first batch of a window; of the one after the last, where that ends."""
    return window * layout.batches // layout.windows


def _window_of(layout: _Layout, batch: int) -> int:
    """Return the window that a batch is in."""
    return ((batch + 1) * layout.windows - 1) // layout.batches


def _in_few_bytes(lengths: NDArray[np.float64]) -> NDArray[Any]:
    """Return equal numbers in the smallest type that holds them: sorting and keeping them is cheaper."""
    low, high = lengths.min(), lengths.max()
    if low >= 0 and np.array_equal(lengths, np.floor(lengths)):
        for kind in _SMALL_TYPES:
            if high <= np.iinfo(kind).max:
                return lengths.astype(kind)
    return lengths
