"""Buffers of the replicas made equal, only when that can matter.

In training a BatchNorm layer's output does not depend on its running statistics, so they need to be equal
only where they are read: in a snapshot and in an evaluation. Rank 0's count, as in DistributedDataParallel,
which sends them at every step. Other buffers are sent after each step that changed them on some rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow.runtime.process.torch_private import (
    broadcast_coalesced,
    buffers_of,
    foreach_copy_,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.runtime.process.context import Worker

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BUCKET_BYTES = 8 * 2**20


def send(worker: Worker, buffers: list[Tensor]) -> None:
    """Give every rank rank 0's tensors. Collective: every rank."""
    if worker.world_size > 1 and buffers:
        group = dist.group.WORLD
        assert group is not None
        broadcast_coalesced(group, buffers, _BUCKET_BYTES)


class ModelBuffers:
    """The model's buffers before each step: equal on all ranks where a step may read them, and remembered, to be restored.

    All ranks take over rank 0's after a step in which some rank changed its own; whether one did travels with the ranks' votes.

    Masks and tables never change, and may be large: after the first step only modules are remembered whose buffers have changed.

    Args:
        keeps_all: Remember all buffers before each step, also those that never changed.
    """

    def __init__(self, worker: Worker, model: nn.Module, *, keeps_all: bool = False) -> None:
        self._worker, self._keeps_all = worker, keeps_all
        self._modules = [module for module in model.modules() if buffers_of(module)]
        self._sent = [
            (module, name)
            for module in self._modules
            if type(module) not in BATCHNORMS
            for name in buffers_of(module)
        ]
        self._changing: set[nn.Module] = set()
        self._marks: list[list[tuple[int, int]]] = []
        self._before: list[_Remembered] = []
        self._steps = 0
        # After the first step it is not known yet: only the next step compares values.
        self._may_change_uncounted = True
        self._seen = self._marks_of_sent()
        is_needed = worker.world_size > 1 and bool(self._sent)
        worker.vote.when("buffers", self._have_changed if is_needed else bool)
        worker.vote.buffers = is_needed  # before the first step, too

    def before_step(self) -> None:
        """Take over rank 0's buffers if some rank has changed its own, and remember them. Collective: every rank."""
        if not self._keeps_all and self._steps:
            self._find_changing()
        if self._worker.vote.buffers:
            sent = [buffers_of(module)[name] for module, name in self._sent]
            send(self._worker, [buffer for buffer in sent if buffer is not None])
            self._seen = self._marks_of_sent()
        is_new = self._keeps_all or not self._steps
        self._before = [
            _Remembered(module, name, buffer, buffer.detach().clone())
            for module in self._modules
            if is_new or module in self._changing or _is_at_work(module)
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        ]
        self._marks, self._steps = self._marks_of_modules(), self._steps + 1

    def restore(self) -> None:
        """Restore the buffers to the beginning of the step, in the same tensors, also where a forward assigned others."""
        for module, name, buffer, _ in self._before:
            buffers_of(module)[name] = buffer
        if self._before:
            with torch.no_grad():
                foreach_copy_([b.buffer for b in self._before], [b.value for b in self._before])
        if self._steps == 1:
            self._steps = 0  # the step has left nothing to compare

    def _find_changing(self) -> None:
        marks = zip(self._modules, self._marks, self._marks_of_modules(), strict=True)
        self._changing |= {module for module, before, now in marks if now != before}
        if self._steps > 1:
            return
        # Some operations change a buffer, and no count of its changes: a batch norm its statistics, code that writes `buffer.data`.
        uncounted = {b.module for b in self._before if b.has_changed()} - self._changing
        self._changing |= uncounted
        self._may_change_uncounted = any(module in uncounted for module, _ in self._sent)

    def _have_changed(self) -> bool:
        return self._keeps_all or self._may_change_uncounted or self._marks_of_sent() != self._seen

    def _marks_of_sent(self) -> list[tuple[int, int]]:
        return _marks_of(buffers_of(module).get(name) for module, name in self._sent)

    def _marks_of_modules(self) -> list[list[tuple[int, int]]]:
        return [_marks_of(buffers_of(module).values()) for module in self._modules]


class _Remembered(NamedTuple):
    """A module's buffer, and its value before the step."""

    module: nn.Module
    name: str
    buffer: Tensor
    value: Tensor

    def has_changed(self) -> bool:
        now = buffers_of(self.module).get(self.name)
        return now is not self.buffer or not torch.equal(now, self.value)


def _is_at_work(module: nn.Module) -> bool:
    """Return whether this step changes running statistics, which may have been frozen in all steps before."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _marks_of(buffers: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    """Return what is another one once a buffer was replaced, or changed by an operation that counts changes."""
    return [(id(buffer), version_of(buffer)) for buffer in buffers if buffer is not None]
