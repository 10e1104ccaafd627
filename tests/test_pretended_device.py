"""The pretended device does what a real one promises, and no more; and finds each wait of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.pretended_device import DeviceTensor, Event, Stream, pretended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.pretended_device import Pretence


@pytest.fixture
def device() -> Iterator[Pretence]:
    """Return the pretended device."""
    with pretended() as pretence:
        yield pretence


def reasons(device: Pretence) -> list[str]:
    """Return what the host has waited for since the last call."""
    found = [wait.reason for wait in device.waits]
    device.waits.clear()
    return found


def test_training_runs_as_on_the_cpu(device: Pretence) -> None:
    """Forward, backward and optimizer give the CPU's bits, and wait for nothing once the data is there."""

    def trained(on: torch.device) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(on)
        inputs, targets = torch.randn(6, 4).to(on), torch.tensor([0, 1, 0, 1, 1, 0], device=on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        device.waits.clear()
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(inputs), targets))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert reasons(device) == []
        return model

    here, there = trained(torch.device("cpu")).state_dict(), trained(device.device).state_dict()
    for name, tensor in there.items():
        assert isinstance(tensor, DeviceTensor)
        assert tensor.device == device.device
        assert torch.equal(tensor.cpu(), here[name])


@pytest.mark.parametrize(
    ("wait", "reason"),
    [
        (lambda t: t[0].item(), "a value: _local_scalar_dense"),
        (lambda t: float(t[0]), "a value: _local_scalar_dense"),
        (lambda t: bool(t[0]), "a value: _local_scalar_dense"),
        (lambda t: t.tolist(), "a copy to the host"),
        (lambda t: t.cpu(), "a copy to the host"),
        (lambda t: t.nonzero(), "a value: nonzero"),
        (lambda t: t[t > 0], "a value: index"),
        (lambda t: torch.equal(t, t), "a value: equal"),
        (lambda t: t.copy_(torch.zeros(3)), "a copy to the device"),
        (lambda t: t.copy_(torch.zeros(3), non_blocking=True), "a copy to the device"),
        (lambda t: torch.zeros(3).copy_(t, non_blocking=True), "a copy to the host"),
        (lambda t: torch.tensor([1.0], device=t.device), "a copy to the device"),
        (lambda t: torch.zeros(3).to(t.device), "a copy to the device"),
    ],
)
def test_waits(device: Pretence, wait: Callable[..., object], reason: str) -> None:
    """Each way to read a value, or to copy without pinned memory, is a wait."""
    tensor = torch.zeros(3, device=device.device) + 1
    assert reasons(device) == []
    wait(tensor)
    assert reasons(device)[0] == reason


def test_indices_are_no_wait(device: Pretence) -> None:
    """The shape of what is read by numbers of rows is known."""
    rows = torch.zeros(2, dtype=torch.long, device=device.device)
    assert torch.zeros(3, device=device.device)[rows].shape == (2,)
    assert reasons(device) == []


def test_pinned_copies_do_not_wait_and_arrive_late(device: Pretence) -> None:
    """A number is here once an event behind its copy was waited for."""
    pinned = torch.empty(1, pin_memory=True)
    pinned.copy_(torch.zeros(1, device=device.device) + 3, non_blocking=True)
    event = Event()
    event.record()
    assert reasons(device) == []
    assert not event.query()
    assert pinned.item() != 3
    event.synchronize()
    assert event.query()
    assert pinned.item() == 3
    assert reasons(device) == ["an event"]


def test_pinned_memory_that_is_written_too_early_is_seen(device: Pretence) -> None:
    """The device may read the source of a copy until somebody has waited for it."""
    pinned = torch.zeros(2, pin_memory=True)
    pinned.to(device.device, non_blocking=True)
    device.synchronize()
    pinned.fill_(1)
    pinned.to(device.device, non_blocking=True)
    pinned.fill_(2)
    with pytest.raises(AssertionError, match="before the device had copied it"):
        device.synchronize()


def test_copy_on_another_stream_runs_as_late_as_it_may(device: Pretence) -> None:
    """Without an event the main stream's next write comes first; with one it comes second."""
    for is_safe in (False, True):
        source, side = torch.ones(2, device=device.device), Stream()
        pinned = torch.empty(2, pin_memory=True)
        with side:
            pinned.copy_(source, non_blocking=True)
        if is_safe:
            side.record_event().wait(device.main)
        source.fill_(9)
        side.synchronize()
        assert pinned.tolist() == ([1, 1] if is_safe else [9, 9])


@pytest.mark.parametrize("is_recorded", [True, False])
def test_freed_memory_is_used_anew_once_recorded_streams_are_through(*, is_recorded: bool) -> None:
    """The allocator knows of no other use than that of the stream which a tensor was made on."""
    with pretended(seed=1) as device:
        side = Stream()

        def moved() -> DeviceTensor:
            with side:
                return torch.ones(2).pin_memory().to(device.device, non_blocking=True)  # type: ignore[return-value]

        first = moved()
        device.main.add(lambda: None)
        if is_recorded:
            first.record_stream(device.main)
        del first
        second = moved()
        assert device.reused == (0 if is_recorded else 1)
        device.run_some(100)
        del second
        third = moved()
        assert device.reused == (1 if is_recorded else 2)
        assert third.on_host.shape == (2,)
