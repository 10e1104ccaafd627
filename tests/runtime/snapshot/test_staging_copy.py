"""The way from the device to staging memory, and when the writer is told."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, view_of
from elasticflow.runtime.snapshot.staging_copy import Copier, CudaCopier, copier_for
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from tests.gpu.marks import on_a_gpu
from tests.runtime.stored import bits, take_step

if TYPE_CHECKING:
    from elasticflow.runtime.snapshot.rank_shard import RankShard

needs_cuda = on_a_gpu


class Job:
    """A small job on a device, one step in."""

    def __init__(self, device: str, width: int = 64) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 4, width)
        )
        self.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inputs = torch.randn(4, 3, 4, 4, device=device)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, capturable=device == "cuda")
        self.state = State(model=self.model, optimizer=self.optimizer)
        self.step()
        self.captured = self.state.capture()
        self.shard: RankShard = ShardPlanner(0, 1).shard_of(self.captured)
        # Shared, as staging memory is: drivers may pin memory of other kinds in another way.
        self.target = memoryview(mmap.mmap(-1, self.shard.nbytes))

    def step(self) -> None:
        """Take a step."""
        take_step(self.model, self.optimizer, self.inputs)

    def expected(self) -> dict[str, Any]:
        """Return the bits that belong into staging memory now."""
        return {key: bits(tensor.cpu()) for key, tensor in self.shard.tensors.items()}

    def staged(self) -> dict[str, Any]:
        """Return the bits that lie there."""
        return {
            entry.key: bits(view_of(self.target, BY_NAME[entry.dtype], entry.shape, entry.offset))
            for entry in self.shard.entries
        }


def test_copy_of_the_cpus_own_memory_is_through_at_once() -> None:
    """On the CPU everything is there when `start` returns, and the writer is told at once."""
    job, told = Job("cpu"), []
    copier = copier_for(torch.device("cpu"), [job.optimizer])
    assert type(copier) is Copier
    copier.start(job.shard, job.target, job.captured.stepped)
    copier.then(lambda: told.append(1))
    assert told == [1]
    assert job.expected() == job.staged()
    copier.poll()
    copier.finish()
    assert told == [1]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("way", ["registered", "bounce"])
def test_training_goes_on_while_the_device_copies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps taken right after `start` write nothing into the copy, and the writer is told when it is through."""
    job, told = Job("cuda", 1024), []
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, CudaCopier)
    if way == "bounce":
        monkeypatch.setattr(copier._memory, "_pin", lambda _: False)
    copier.start(job.shard, job.target, job.captured.stepped)  # pinning memory may wait for the device
    copier.finish()
    for _ in range(3):
        expected = job.expected()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the copy cannot be through before this
        copier.start(job.shard, job.target, job.captured.stepped)
        copier.then(lambda: told.append(1))
        copier.poll()
        assert told == []
        job.step()
        job.step()
        copier.finish()
        assert told == [1]
        told.clear()
        assert expected == job.staged()
        assert expected != job.expected()
        job.state.capture()  # packs the scalars anew


@pytest.mark.gpu
@needs_cuda
def test_memory_the_driver_refuses_is_bounced() -> None:
    """Memory that is registered already cannot be registered again: a pinned piece of our own takes its place."""
    job = Job("cuda")
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, CudaCopier)
    view = torch.frombuffer(job.target, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert int(cudart.cudaHostRegister(view.data_ptr(), view.numel(), 1)) == 0
    try:
        copier.start(job.shard, job.target, job.captured.stepped)
        job.step()  # no kernel reports the driver's refusal as its own error
        torch.cuda.synchronize()
        copier.finish()
        assert copier._memory._bounce is not None
    finally:
        cudart.cudaHostUnregister(view.data_ptr())


@pytest.mark.gpu
@needs_cuda
def test_new_share_lets_go_of_old_memory() -> None:
    """When the tensors are others, the buffers are, too: the old ones are given back to the driver."""
    job = Job("cuda")
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, CudaCopier)
    copier.start(job.shard, job.target, job.captured.stepped)
    copier.finish()
    job.model.register_buffer("more", torch.ones(3, device="cuda"))
    captured = job.state.capture()
    shard = ShardPlanner(0, 1).shard_of(captured)
    other = memoryview(bytearray(shard.nbytes))
    copier.start(shard, other, captured.stepped)
    copier.finish()
    assert list(copier._memory._known.values()) in ([other], [])
