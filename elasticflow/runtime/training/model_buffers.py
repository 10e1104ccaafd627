"""Buffers of the replicas made equal, only when that can matter.

In training a BatchNorm layer's output does not depend on its running statistics, so they need to be equal
only where they are read: in a snapshot and in an evaluation. Rank 0's count, as in DistributedDataParallel,
which sends them at every step. Other buffers are sent after each step that changed them on some rank.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow.runtime.process.torch_private import broadcast_coalesced, buffers_of, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.runtime.process.context import Worker

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BUCKET_BYTES = 8 * 2**20


def make_equal(worker: Worker, model: nn.Module) -> None:
    """Give every rank rank 0's buffers. Collective: every rank."""
    send(worker, list(model.buffers()))


def send(worker: Worker, buffers: list[Tensor]) -> None:
    """Give every rank rank 0's tensors. Collective: every rank."""
    if worker.world_size > 1 and buffers:
        group = dist.group.WORLD
        assert group is not None
        broadcast_coalesced(group, buffers, _BUCKET_BYTES)


class BufferWatch:
    """Has all ranks take over rank 0's buffers before a step that may read them, where some rank changed its own.

    Whether one did travels with the ranks' votes.
    """

    def __init__(self, worker: Worker, model: nn.Module) -> None:
        self._worker = worker
        self._slots = [
            (buffers_of(module), name)
            for module in model.modules()
            if type(module) not in BATCHNORMS
            for name in buffers_of(module)
        ]
        self._seen = self._marks()
        is_needed = worker.world_size > 1 and bool(self._slots)
        worker.vote.when("buffers", self._have_changed if is_needed else bool)
        worker.vote.buffers = is_needed  # before the first step, too

    def before_step(self) -> None:
        """Give every rank rank 0's watched buffers if some rank's have changed. Collective: every rank."""
        if self._worker.vote.buffers:
            buffers = [buffer for table, name in self._slots if (buffer := table[name]) is not None]
            send(self._worker, buffers)
            self._seen = self._marks()

    def _have_changed(self) -> bool:
        return self._marks() != self._seen

    def _marks(self) -> list[tuple[int, int]]:
        return _marks_of(table.get(name) for table, name in self._slots)


class _Remembered(NamedTuple):
    """A buffer in its module's table, and its value before the step."""

    table: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    value: Tensor

    def has_changed(self) -> bool:
        now = self.table.get(self.name)
        return now is not self.buffer or not torch.equal(now, self.value)


class BuffersBefore:
    """The model's buffers as they were before a step, to be restored if the step turns out not to count.

    Masks and tables never change, and may be large: after the first step only modules are copied whose buffers have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for table in map(buffers_of, model.modules()) if table]
        self._changing: set[int] = set()  # places in `_tables`
        self._marks: list[list[tuple[int, int]]] = []
        self._before: list[list[_Remembered]] = []
        self._steps = 0

    def remember(self) -> None:
        """Remember the buffers at the beginning of a step: in the first step all of them, later those of modules that change some."""
        places = range(len(self._tables))
        marks = [_marks_of(table.values()) for table in self._tables]
        if self._steps:
            self._changing |= {place for place in places if marks[place] != self._marks[place]}
        # Some operations change a buffer, and no count of its changes: a batch norm its statistics.
        if self._steps == 1:
            self._changing |= {place for place in places if any(b.has_changed() for b in self._before[place])}
        chosen = places if self._steps == 0 else sorted(self._changing)
        self._before = [_remembered(self._tables[place]) for place in chosen]
        self._marks, self._steps = marks, self._steps + 1

    def restore(self) -> None:
        """Restore what was remembered, into the same tensors."""
        for table, name, buffer, value in chain.from_iterable(self._before):
            table[name] = buffer
            buffer.copy_(value)


def _remembered(table: dict[str, Tensor | None]) -> list[_Remembered]:
    return [_Remembered(table, name, b, b.clone()) for name, b in table.items() if b is not None]


def _marks_of(buffers: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    """Return what is another one once a buffer was replaced, or changed by an operation that counts changes."""
    return [(id(buffer), version_of(buffer)) for buffer in buffers if buffer is not None]
