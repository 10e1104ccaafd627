"""Memory and use of this rank's accelerator, as torch's allocator and the driver have them; nothing waits for the device."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import suppress
from typing import Any

import torch

from elasticflow.protocol.worker_environment import DeviceUsage

_SUMMARY_LINES = 25
_SIZES = "allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak"


class UsageReader:
    """Reads the usage of a device; asks the driver for its utilization in a thread, so that no step waits for the answer.

    The utilization needs an NVIDIA GPU and the package `nvidia-ml-py`; torch finds the GPU behind CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        can_ask = device.type == "cuda" and importlib.util.find_spec("pynvml") is not None
        self._ask: Any = torch.cuda.utilization if can_ask else None
        self._thread: threading.Thread | None = None
        self._utilization: int | None = None

    def read(self) -> DeviceUsage | None:
        """Return the usage, with the utilization as it was at the call before; None on the CPU."""
        if self._device.type == "cpu":
            return None
        allocated, reserved, peak = _sizes(self._device)
        if self._ask is not None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return DeviceUsage(allocated, reserved, peak, self._utilization)

    def _look(self) -> None:
        try:
            self._utilization = int(self._ask(self._device))
        except Exception:  # noqa: BLE001  # the driver refuses, or the package is another: it is not asked again
            self._ask = self._utilization = None


def _sizes(device: torch.device) -> tuple[int, ...]:
    stats = torch.accelerator.memory_stats(device)
    return tuple(int(stats.get(name, 0)) for name in _SIZES)


def memory_line(device: torch.device) -> str | None:
    """Return how much memory of *device* this process has, in a line for the error of a failure; None: unknown. Never raises."""
    if device.type == "cpu":
        return None
    with suppress(Exception):
        allocated, reserved, peak = (f"{size / 1e9:.2f} GB" for size in _sizes(device))
        return f"{device}: {allocated} in tensors, peak {peak}, {reserved} reserved by torch's allocator"
    return None


def memory_summary(device: torch.device) -> str | None:
    """Return the allocator's summary of *device*, shortened, for a worker's standard error; None: unknown.

    Never raises: it is called while a failure is reported.
    """
    if device.type == "cpu":
        return None
    with suppress(Exception):
        module: Any = torch.get_device_module(device)
        text = str(module.memory_summary(device, abbreviated=True))
        lines = [line.rstrip() for line in text.splitlines() if line.strip("|-= ")]
        return "\n".join(lines[:_SUMMARY_LINES])
    return None
