"""Buffers of the replicas made equal, only when that can matter.

In training a BatchNorm layer's output does not depend on its running statistics, so they need to be equal
only where they are read: in a snapshot and in an evaluation. Rank 0's count, as in DistributedDataParallel,
which sends them at every step. Other buffers are sent after each step that changed them on some rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from elasticflow.runtime.torch_private import broadcast_coalesced, buffers_of, version_of

if TYPE_CHECKING:
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
    """Knows which buffers a forward may read in training, and whether they changed.

    Attributes:
        are_any: There are such buffers.
    """

    def __init__(self, worker: Worker, model: nn.Module) -> None:
        self._worker = worker
        self._slots = [
            (buffers_of(module), name)
            for module in model.modules()
            if type(module) not in BATCHNORMS
            for name in buffers_of(module)
        ]
        self.are_any = bool(self._slots)
        self._seen = self._marks()

    def have_changed(self) -> bool:
        """True if this rank's buffers changed since they were last equal."""
        return self._marks() != self._seen

    def make_equal(self) -> None:
        """Give every rank rank 0's watched buffers. Collective: every rank."""
        send(self._worker, [buffer for buffers, name in self._slots if (buffer := buffers[name]) is not None])
        self._seen = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        found = (buffers.get(name) for buffers, name in self._slots)
        return [(id(buffer), version_of(buffer)) for buffer in found if buffer is not None]
