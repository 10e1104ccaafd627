"""The way from the device to staging memory, and when the writer is told."""

from __future__ import annotations

import mmap
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW, Optimizer

from elasticflow.runtime.snapshot import staging_copy
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, address_of, view_of
from elasticflow.runtime.snapshot.staging_copy import Copier, DeviceCopier, copier_for
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.snapshots.client.channel import Channel
from elasticflow.snapshots.client.messages import TO_WORKER, TO_WRITER
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.memory import Slot
from tests.gpu.marks import on_a_gpu
from tests.runtime.stored import bits, take_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.snapshot.rank_shard import RankShard


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
    copier.then(lambda _: told.append(1))
    assert told == [1]
    assert job.expected() == job.staged()
    copier.poll()
    copier.finish()
    assert told == [1]


@on_a_gpu
@pytest.mark.parametrize("way", ["registered", "bounce"])
def test_training_goes_on_while_the_device_copies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps taken right after `start` write nothing into the copy, and the writer is told when it is through."""
    job, told = Job("cuda", 1024), []
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, DeviceCopier)
    if way == "bounce":
        monkeypatch.setattr(copier._memory, "_pin", lambda _: False)
    copier.start(job.shard, job.target, job.captured.stepped)  # pinning memory may wait for the device
    copier.finish()
    for _ in range(3):
        expected = job.expected()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the copy cannot be through before this
        copier.start(job.shard, job.target, job.captured.stepped)
        copier.then(lambda _: told.append(1))
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


@on_a_gpu
def test_memory_the_driver_refuses_is_bounced() -> None:
    """Memory that is registered already cannot be registered again: a pinned piece of our own takes its place."""
    job = Job("cuda")
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, DeviceCopier)
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


@on_a_gpu
def test_released_memory_is_unpinned() -> None:
    """Before a buffer is unmapped the driver lets go of it: it can be registered again."""
    job = Job("cuda")
    copier = copier_for(torch.device("cuda"), [job.optimizer])
    assert isinstance(copier, DeviceCopier)
    copier.start(job.shard, job.target, job.captured.stepped)
    copier.release(job.target)
    view = torch.frombuffer(job.target, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert int(cudart.cudaHostRegister(view.data_ptr(), view.numel(), 1)) == 0
    cudart.cudaHostUnregister(view.data_ptr())


def test_released_memory_is_not_looked_at_any_more() -> None:
    """A buffer can be unmapped once the copier let go of it; the views of another stay."""
    job = Job("cpu")
    copier = copier_for(torch.device("cpu"), [job.optimizer])
    memories = [mmap.mmap(-1, job.shard.nbytes) for _ in range(2)]
    for memory in memories:
        copier.start(job.shard, memoryview(memory), job.captured.stepped)
        with pytest.raises(BufferError):
            memory.close()
    copier.release(memoryview(memories[0]))
    memories[0].close()
    with pytest.raises(BufferError):
        memories[1].close()


class Driver:
    """Counts what is pinned; stands for CUDA's runtime.

    Attributes:
        calls: Address and size of each registered range.
        pinned: Addresses that are registered now.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        """Register a range, which must not be registered."""
        assert flags == 1
        assert address not in self.pinned
        self.calls.append((address, nbytes))
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        """Let go of a range."""
        self.pinned.remove(address)
        return 0


class WholeSteps(Optimizer):
    """Counts its steps by a whole number, as most optimizers outside torch do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.add_(state["mean"], alpha=-group["lr"])


class Fresh:
    """Makes a new tensor at each call of `state_dict`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state."""
        return {"mean": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`."""


def _hooked() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    return model


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamW": (partial(nn.Linear, 8, 8), AdamW, {}),
    "Adafactor": (partial(nn.Linear, 8, 8), torch.optim.Adafactor, {}),
    "Muon": (partial(nn.Linear, 8, 8, bias=False), torch.optim.Muon, {}),
    "weight_norm": (lambda: weight_norm(nn.Linear(8, 8)), AdamW, {}),
    "whole steps": (partial(nn.Linear, 8, 8), WholeSteps, {}),
    "a hook": (_hooked, AdamW, {}),
    "a new tensor each time": (partial(nn.Linear, 8, 8), AdamW, {"fresh": Fresh()}),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_buffer_is_pinned_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a job's state consists of: two buffers, filled in turn, are registered once each, until they are dropped."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = staging_copy._PinnedMemory(torch.device("cuda"))
    make_model, make_optimizer, include = JOBS[kind]
    model = make_model()
    state = State(model=model, optimizer=make_optimizer(model.parameters()), include=include)
    planner, inputs, shards = ShardPlanner(0, 1), torch.ones(2, 8), []
    buffers = [bytearray(1 << 16) for _ in range(2)]
    for number in range(6):
        take_step(model, next(iter(state.optimizers.values())), inputs)
        shards.append(planner.shard_of(state.capture()))
        target = memoryview(buffers[number % 2])[: shards[-1].nbytes]
        assert memory.of(target) is target
    assert len(driver.calls) == 2
    assert driver.pinned == {address_of(memoryview(buffer)) for buffer in buffers}
    for buffer in buffers:
        memory.release(memoryview(buffer))
    assert not driver.pinned
    # A shard whose tensors stay where they are is planned once.
    assert len(set(map(id, shards[1:]))) == (5 if include else 1)


def test_a_larger_shard_in_the_same_buffer_is_pinned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver pins all of the range that the device writes to."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory, buffer = staging_copy._PinnedMemory(torch.device("cuda")), memoryview(bytearray(1 << 12))
    for nbytes in (100, 200, 50, 200):
        memory.of(buffer[:nbytes])
    assert [nbytes for _, nbytes in driver.calls] == [100, 200]


def test_a_client_that_drops_its_buffers_has_them_unpinned() -> None:
    """The copier lets go before the client gives shared memory up: for larger buffers, and where it closes."""
    told: list[str] = []
    here, there = socket.socketpair()
    client = StagingClient(Channel(here, TO_WRITER, TO_WORKER))
    client.dropping = lambda _: told.append("dropping")
    client.reserve(10)
    assert told == []
    client.slots = [Slot(1, os.open(os.devnull, os.O_RDONLY), 10, mmap.mmap(-1, 10))]
    client.reserve(20)
    assert told == ["dropping"]
    client.slots = [Slot(1, os.open(os.devnull, os.O_RDONLY), 20, mmap.mmap(-1, 20))]
    client.close()
    assert told == ["dropping"] * 2
    there.close()
