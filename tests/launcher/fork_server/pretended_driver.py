"""A driver of one GPU for torch's CPU build: it counts devices and opens as CUDA does, and computes nothing.

Run in a process of its own, by `pretend()`, after `warm_up`: what torch binds at import stays as it is without CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.cuda.random

from tests.gpu.pretended.driver import Driver


def pretend(*, by_nvml: bool) -> Driver:
    """Have torch find one GPU in this process and its forks.

    Args:
        by_nvml: NVML counts it; else, as with MIG devices, only the driver does.
    """
    driver = Driver()
    torch._C._cuda_getDeviceCount = driver.count
    torch.cuda._device_count_nvml = lambda: 1 if by_nvml else -1
    torch.cuda._is_in_bad_fork = driver.is_in_bad_fork
    torch.cuda._lazy_init = torch.cuda.random._lazy_init = driver.init  # type: ignore[attr-defined]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9)  # type: ignore[assignment]
    current = torch.device("cuda")
    is_there = torch.cuda.is_available
    torch.accelerator.current_accelerator = lambda check_available=False: (
        current if not check_available or is_there() else None
    )
    return driver
