"""Datasets opened, and batches read in the schedule's order (floor R)."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from elasticflow import events
from elasticflow.errors import DatasetError
from elasticflow.lifeline import die_with_parent
from elasticflow.runtime import dataset as datasets
from elasticflow.runtime import streams
from elasticflow.runtime.order import Position, Schedule, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.member import Worker

_AHEAD = 4096  # samples whose order is computed at once: numpy's cost per call is shared out
_MOST_STEPS_AHEAD = 256


def open_dataset(me: Worker, build: Callable[[], Any], name: str, samples: int | None = None) -> Any:
    """Return the dataset that *build* makes, checked, the same data on every rank. Collective: every rank.

    Raises:
        DatasetError: it has no length or another one than *samples*, or the ranks opened different data.
    """
    dataset = build()
    length = datasets.check(dataset, name, samples)
    mark = datasets.fingerprint(dataset)
    marks = me.gather_text(mark)
    different = [rank for rank, other in enumerate(marks) if other != marks[0]]
    if different:
        raise DatasetError(
            f"rank {different[0]} opened other data for `{name}` than rank 0: fingerprint {marks[different[0]]}, not {marks[0]}",
            "make sure that every node sees the same files",
        )
    me.fingerprints[name] = mark
    if me.rank == 0:
        source = datasets.source(dataset)
        me.event(events.DATASET_OPENED, name=name, samples=length, fingerprint=mark, source=source)
    me.reseed()
    return dataset


def prepare(me: Worker, fn: Callable[[], object]) -> None:
    """Run *fn* once per node, before any rank of the node goes on. Collective: every rank."""
    if me.local_rank == 0:
        fn()
    me.barrier()
    me.reseed()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's samples, as far as this rank reads them.

    Attributes:
        count: Samples of all ranks.
        end: Position after the step.
        num_micro_batches: How many `micro_batches` yields; nought for a rank without samples.
        micro_batches: Yields (batch on the device, number of its samples); can be read once.
    """

    count: int
    end: Position
    num_micro_batches: int
    micro_batches: Iterator[tuple[Any, int]]


@dataclass(frozen=True, slots=True)
class _Step:
    count: int
    end: Position
    pieces: list[list[int]]


class Loader:
    """Reads this rank's part of every global batch.

    Args:
        me: This worker.
        dataset: What `open_dataset` returned.
        schedule: The order.
        micro_batch_size: Most samples in one forward, None for all of a rank's part at once.
        processes: Loader processes; 0 reads in this process.
        collate: Makes a batch of a list of samples; None for torch's.
    """

    def __init__(
        self,
        me: Worker,
        dataset: Any,
        schedule: Schedule,
        micro_batch_size: int | None,
        *,
        processes: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._me, self._schedule, self._processes = me, schedule, processes
        self._micro_batch_size = micro_batch_size
        self._samples = _SeededSamples(dataset)
        self._collate = collate or default_collate

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield the steps after *position* up to the schedule's end."""
        keyed = self._keyed_pieces(position)
        fetch = self._here(keyed) if self._processes == 0 else self._in_processes(keyed)
        if self._me.device.type != "cpu":
            fetch = (to_device(batch, self._me.device) for batch in fetch)
        for step in self._steps(position):
            yield Batch(step.count, step.end, len(step.pieces), _with_counts(fetch, step.pieces))

    def _here(self, keyed: Iterator[list[int]]) -> Iterator[Any]:
        for piece in keyed:
            yield self._collate(self._samples.__getitems__(piece))

    def _in_processes(self, keyed: Iterator[list[int]]) -> Iterator[Any]:
        return iter(
            DataLoader(
                self._samples,  # type: ignore[arg-type]  # map-style by __getitems__ alone
                batch_sampler=keyed,
                num_workers=self._processes,
                collate_fn=self._collate,
                pin_memory=self._me.device.type == "cuda",
                worker_init_fn=_become_loader_process(os.getpid()),
                generator=torch.Generator(),  # leaves the global generator alone
            )
        )

    def _keyed_pieces(self, position: Position) -> Iterator[list[int]]:
        seed, rank = self._me.seed, self._me.rank
        for step in self._steps(position):
            for number, piece in enumerate(step.pieces):
                yield [streams.data_key(seed, step.end.step, rank, number), *piece]

    def _steps(self, position: Position) -> Iterator[_Step]:
        me, schedule = self._me, self._schedule
        mine = max(1, schedule.global_batch_size // me.world_size)
        ahead = min(_MOST_STEPS_AHEAD, max(1, _AHEAD // mine))
        plan = _batches_after(schedule, position)
        while chunk := list(islice(plan, ahead)):
            ranges = [
                rank_range(offset, count, schedule, me.world_size, me.rank) for offset, count, _ in chunk
            ]
            places = np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in ranges])
            samples = schedule.indices(places).tolist()
            begin = 0
            for (_, count, end), (low, high) in zip(chunk, ranges, strict=True):
                yield _Step(count, end, self._cut(samples[begin : begin + high - low]))
                begin += high - low

    def _cut(self, samples: list[int]) -> list[list[int]]:
        if not samples:
            return []
        size = self._micro_batch_size or len(samples)
        parts = -(-len(samples) // size)
        if parts == 1:
            return [samples]
        ranges = (split(len(samples), parts, i) for i in range(parts))
        return [samples[low:high] for low, high in ranges]


def rank_range(offset: int, count: int, schedule: Schedule, world_size: int, rank: int) -> tuple[int, int]:
    """Return the places of the stream that *rank* reads of a batch.

    A last, small batch goes to fewer ranks, two samples each: BatchNorm refuses a single one.
    """
    ranks = world_size
    if count < schedule.global_batch_size and count < 2 * world_size:
        ranks = max(1, count // 2)
    if rank >= ranks:
        return offset + count, offset + count
    low, high = split(count, ranks, rank)
    return offset + low, offset + high


def _batches_after(schedule: Schedule, position: Position) -> Iterator[tuple[int, int, Position]]:
    for _ in range(schedule.remaining(position)):
        offset, count, position = schedule.batch(position)
        yield offset, count, position


def _with_counts(fetch: Iterator[Any], pieces: list[list[int]]) -> Iterator[tuple[Any, int]]:
    for piece in pieces:
        yield next(fetch), len(piece)


class _SeededSamples:
    """A dataset read by `[seed, index, index, ...]`: what it draws depends on the seed alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._many = getattr(dataset, "__getitems__", None)

    def __getitems__(self, keyed: list[int]) -> list[Any]:
        key, *indices = keyed
        streams.seed_data(key)
        if self._many is not None:
            found: list[Any] = self._many(indices)
            return found
        dataset = self._dataset
        return [dataset[index] for index in indices]


def _become_loader_process(parent: int) -> Callable[[int], None]:
    def become(_: int) -> None:
        # A drain signal sent to the whole session is the worker's business; without the worker this process has none.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent)

    return become


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with everything in it that can be moved on *device*."""
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
