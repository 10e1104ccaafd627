"""Usage of a device, from the allocator and the driver of a device that is not there."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticflow.protocol.worker_environment import DeviceUsage
from elasticflow.runtime.measuring.device_memory import UsageReader, memory_line, memory_summary

CUDA = torch.device("cuda", 0)
STATS = {
    "allocated_bytes.all.current": 700, "reserved_bytes.all.current": 2000, "allocated_bytes.all.peak": 900,
}  # fmt: skip


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's allocator know of some bytes."""
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _: STATS)


def with_driver(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """Have the driver answer."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "utilization", ask)


def joined(reader: UsageReader) -> DeviceUsage | None:
    """Return the usage once the driver has answered."""
    reader.read()
    assert reader._thread is not None
    reader._thread.join()
    return reader.read()


def test_cpu_has_no_usage() -> None:
    """Nothing is asked."""
    assert UsageReader(torch.device("cpu")).read() is None
    assert memory_summary(torch.device("cpu")) is memory_line(torch.device("cpu")) is None


def test_memory_is_known_without_the_drivers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The utilization is not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert UsageReader(CUDA).read() == DeviceUsage(700, 2000, 900, None)


def test_utilization_is_asked_for_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that reads has the answer to the question before."""
    with_driver(monkeypatch, lambda device: 87 if device == CUDA else 0)
    assert joined(UsageReader(CUDA)) == DeviceUsage(700, 2000, 900, 87)


def test_driver_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is known all the same."""
    asked = []

    def refuse(device: torch.device) -> int:
        asked.append(device)
        raise RuntimeError("Driver/library version mismatch")

    with_driver(monkeypatch, refuse)
    reader = UsageReader(CUDA)
    assert joined(reader) == DeviceUsage(700, 2000, 900, None)
    assert reader.read() == DeviceUsage(700, 2000, 900, None)
    assert asked == [CUDA]


def test_summary_of_the_allocator_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lines that only draw the table."""
    table = (
        "|=====|\n| PyTorch CUDA memory summary |\n|-----|\n" + "| Allocated memory | 700 B |\n|-----|\n" * 40
    )

    def summary(device: torch.device, *, abbreviated: bool) -> str:
        assert (device, abbreviated) == (CUDA, True)
        return table

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(memory_summary=summary))
    text = memory_summary(CUDA)
    assert text is not None
    assert text.splitlines()[:2] == ["| PyTorch CUDA memory summary |", "| Allocated memory | 700 B |"]
    assert len(text.splitlines()) == 25


def test_summary_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure that is being reported matters more."""

    def broken(_: torch.device) -> object:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch, "get_device_module", broken)
    monkeypatch.setattr(torch.accelerator, "memory_stats", broken)
    assert memory_summary(CUDA) is memory_line(CUDA) is None


def test_line_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """In GB, of the device by its name."""
    sizes = dict(zip(STATS, (70_100_000_000, 72_300_000_000, 71_000_000_000), strict=True))
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _: sizes)
    expected = "cuda:0: 70.10 GB in tensors, peak 71.00 GB, 72.30 GB reserved by torch's allocator"
    assert memory_line(CUDA) == expected
