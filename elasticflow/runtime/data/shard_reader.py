"""The samples of data shards, read in order from a cursor on, here or in loader processes."""

from __future__ import annotations

import time
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.loader_processes import LoaderProcesses
from elasticflow.runtime.data.packing import packed, unpacked
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.torch_private import forget_loader_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.runtime.data.loader_processes import LeaveWhileWaiting

_REPORT_EVERY_S = 1.0
_USE = 2  # of random streams: 0 and 1 are datasets read by index


class Chunk(NamedTuple):
    """Some samples of a shard.

    Attributes:
        is_end: The shard has no more in this epoch.
        passed: Instead of samples: how many were read and left out so far, on the way to the cursor.
    """

    shard: int
    samples: list[Any]
    is_end: bool = False
    passed: int = 0


class ShardReader:
    """Reads data shards.

    What a shard draws from random, numpy's global generator or torch's on the CPU depends on seed, epoch, shard and
    the sample's number alone, also where it is only passed on the way to a cursor: shards may shuffle. What it draws
    before its first sample does not depend on the shard: files may be shuffled and every n-th taken.

    Args:
        build: Function of `shard` and `shards`, called at the beginning of each epoch; returns the shard's samples.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        shards: int,
        *,
        seed: int,
        size: int,
        epochs: int | None,
    ) -> None:
        self._build, self._shards, self._seed = build, shards, seed
        self._size, self._epochs = size, epochs

    def chunks(self, numbers: Sequence[int], epoch: int, cursors: Sequence[int]) -> Iterator[Chunk]:
        """Yield the samples of the shards *numbers* after their cursors, in turns, epoch after epoch.

        Raises:
            DatasetError: a shard cannot be iterated over, or ends before its cursor.
        """
        for now in count(epoch) if self._epochs is None else range(epoch, self._epochs):
            turns = [self._of_shard(shard, now, cursors[shard] if now == epoch else 0) for shard in numbers]
            while turns:
                for shard_chunks in list(turns):
                    chunk = next(shard_chunks)
                    yield chunk
                    if chunk.is_end:
                        turns.remove(shard_chunks)

    def _of_shard(self, shard: int, epoch: int, cursor: int) -> Iterator[Chunk]:
        self._reseed(shard, epoch, 0)  # opened in the same state wherever it is read from
        samples, number = self._opened(shard, epoch, cursor)
        reported = time.monotonic()
        for passed in range(number, cursor):
            # The shard's own code may begin with the first one.
            self._reseed(shard, epoch, 0 if passed == number else passed)
            if next(samples, self) is self:
                ended = f"ended after {passed} samples, and {cursor} of it"
                less = f"has fewer samples than the {cursor} of it that"
                raise DatasetError(
                    f"data shard {shard} {less if number else ended} had been trained on",
                    "a shard must have the same samples in the same order each time it is read",
                )
            if time.monotonic() - reported > _REPORT_EVERY_S:
                yield Chunk(shard, [], passed=passed + 1)
                reported = time.monotonic()
        read: list[Any] = []
        for number in count(cursor):
            self._reseed(shard, epoch, number)
            try:
                read.append(next(samples))
            except StopIteration:
                break
            if len(read) == self._size:
                yield Chunk(shard, read)
                read = []
        yield Chunk(shard, read, is_end=True)

    def _opened(self, shard: int, epoch: int, cursor: int) -> tuple[Iterator[Any], int]:
        """Return the samples of a shard, and how many of them are left out already: with `skip`, all before the cursor but one.

        Some datasets read and draw for what they skip when they are asked for the first sample that is left. With a sample before
        the cursor's as the first, the cursor's own draws what it would have drawn; and a shard that ends before it is noticed.
        """
        samples, passed = require_iterable(self._build(shard=shard, shards=self._shards)), 0
        _set_epoch(samples, epoch)
        skip = getattr(samples, "skip", None)
        if cursor > 1 and callable(skip):
            passed = cursor - 1
            samples = skip(passed)
            if not hasattr(samples, "__iter__"):
                raise DatasetError(
                    f"skip({passed}) of a data shard returned a {type(samples).__name__}, which has no __iter__",
                    "let skip(count) return an iterable of the samples after the first `count`: self, if it moves in place",
                )
            _set_epoch(samples, epoch)
        return iter(samples), passed

    def _reseed(self, shard: int, epoch: int, number: int) -> None:
        use = _USE + (self._shards if number == 0 else shard)
        random_streams.seed_all(random_streams.sample_key(self._seed, epoch, number, use))


def require_iterable(samples: Any) -> Any:
    """Return the samples of a shard.

    Raises:
        DatasetError: they cannot be iterated over.
    """
    if not hasattr(samples, "__iter__"):
        kind = type(samples).__name__
        raise DatasetError(
            f"dataset.entry returned a {kind} for a data shard, which has no __iter__",
            "return what yields the samples of that shard in order; leave dataset.shards out if it is read by index",
        )
    return samples


def _set_epoch(samples: Any, epoch: int) -> None:
    set_epoch = getattr(samples, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def read_ahead(chunks: Iterator[Chunk], shard: Any, wait: LeaveWhileWaiting) -> Iterator[Chunk]:
    """Return *chunks* as a process of its own reads them, which starts now; errors name the class of *shard*."""
    reader: Any = _ChunkReader(chunks)
    return map(unpacked, LoaderProcesses(reader, shard, repeat((0, [])), 1, pins_memory=False, wait=wait))


class _ChunkReader:
    """Reads in a loader process: each read gives the next chunk, whatever it asks for.

    As bytes: tensors that torch sends itself take a file descriptor each.
    """

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks

    def enter_process(self, _: object) -> None:
        # A dataset that finds itself in one of torch's loader processes reads a part only; here its part is the shard.
        forget_loader_process()

    def read(self, _place: int, _indices: list[int]) -> bytes:
        return packed(
            next(self._chunks, None), keeps_classes=True
        ).getvalue()  # past the end no one waits for it
