"""Datasets opened, and batches read in the schedule's order (floor R)."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from elasticflow import events
from elasticflow.errors import DatasetError
from elasticflow.lifeline import die_with_parent
from elasticflow.runtime import dataset as datasets
from elasticflow.runtime import streams
from elasticflow.runtime.steps import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.member import Worker
    from elasticflow.runtime.order import Position, Schedule
    from elasticflow.runtime.streams import Generators


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


class Batch(NamedTuple):
    """One step's samples, as far as this rank reads them.

    Attributes:
        samples: Samples of all ranks.
        end: Position after the step.
        model_keys: For each micro-batch, the seed under which the model runs; none for a rank without samples.
        micro_batches: Yields (batch on the device, number of its samples); can be read once.
    """

    samples: int
    end: Position
    model_keys: list[int]
    micro_batches: Iterator[tuple[Any, int]]


class Loader:
    """Reads this rank's part of every global batch.

    Args:
        me: This worker.
        dataset: What `open_dataset` returned.
        schedule: The order.
        micro_batch_size: Most samples in one forward, None for all of a rank's part at once.
        processes: Loader processes; 0 reads in this process.
        collate: Makes a batch of a list of samples; None for torch's.
        shards: Virtual shards of each batch, read one by one; None: micro-batches.
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
        shards: int | None = None,
    ) -> None:
        self._me, self._processes, self._stays_here = me, processes, me.device.type == "cpu"
        self._plan = Plan(
            schedule, micro_batch_size, world_size=me.world_size, rank=me.rank, seed=me.seed, shards=shards
        )
        self._samples = _SeededSamples(dataset, None if processes else me.generators)
        self._collate = collate or default_collate

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield the steps after *position* up to the schedule's end."""
        fetch = self._in_processes(position) if self._processes else None
        for samples, end, pieces, model_keys in self._plan.after(position):
            yield Batch(samples, end, model_keys, self._micro_batches(pieces, fetch))

    def _micro_batches(
        self, pieces: list[list[int]], fetch: Iterator[Any] | None
    ) -> Iterator[tuple[Any, int]]:
        if fetch is None:
            return map(self._read, pieces)
        return ((self._placed(next(fetch)), len(piece) - 1) for piece in pieces)

    def _read(self, piece: list[int]) -> tuple[Any, int]:
        return self._placed(self._collate(self._samples.read(piece))), len(piece) - 1

    def _placed(self, batch: Any) -> Any:
        return batch if self._stays_here else to_device(batch, self._me.device)

    def _in_processes(self, position: Position) -> Iterator[Any]:
        keyed = (piece for step in self._plan.after(position) for piece in step.pieces)
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


class _SeededSamples:
    """A dataset read by `[seed, index, index, ...]`: what it draws depends on the seed alone.

    Args:
        dataset: The dataset.
        generators: This process's; None in a loader process, which no step waits for: there all are seeded.
    """

    def __init__(self, dataset: Any, generators: Generators | None) -> None:
        self._dataset, self._generators = dataset, generators
        self._many = getattr(dataset, "__getitems__", None)

    def __getitems__(self, keyed: list[int]) -> list[Any]:  # torch's loader calls it by this name
        return self.read(keyed)

    def read(self, keyed: list[int]) -> list[Any]:
        key, *indices = keyed
        generators = self._generators
        if generators is None:
            streams.seed_data(key)
            return self._read(indices)
        draws = generators.are_used
        generators.seed_data(key)
        found = self._read(indices)
        if not draws and generators.look():  # it drew for the first time: once more, seeded
            generators.seed_data(key)
            found = self._read(indices)
        return found

    def _read(self, indices: list[int]) -> list[Any]:
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
