"""Numbers on their way between the host and its device, for which the host waits at most once, and only where it needs them.

Each copy has pinned memory of its own from torch's allocator, which hands out a block again only after the copies that use it
(torch 2.13, aten/src/ATen/core/CachingHostAllocator.h: `record_event` of each non-blocking copy, `process_events` before a block
is given out). So no copy reads memory that was written for a later step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_SINGLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def to_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return *numbers* on *device*, in torch's default dtype if *dtype* is None; the host does not wait."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class HostCopy:
    """Values of a device's tensor as they are now, on their way to the host.

    Args:
        tensor: Tensor on a device other than the CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._here.copy_(tensor.detach(), non_blocking=True)
        self._arrival = torch.Event(tensor.device)
        self._arrival.record()

    def tolist(self) -> list[float]:
        """Return the values once they are here."""
        self._arrival.synchronize()
        values: list[float] = self._here.tolist()
        return values

    def __float__(self) -> float:
        """Return the only value once it is here."""
        self._arrival.synchronize()
        return float(self._here)


def copy_to_host(number: Tensor) -> SupportsFloat:
    """Return a tensor's only value; the host waits for a device's value when `float` is called."""
    return HostCopy(number) if number.device.type != "cpu" else float(number.detach())


def read_together(values: Sequence[SupportsFloat]) -> list[float]:
    """Return *values* as numbers; those on a device are read together, in one wait."""
    numbers, by_device = [0.0] * len(values), dict[torch.device, list[tuple[int, Tensor]]]()
    for place, value in enumerate(values):
        tensor = value.detach() if isinstance(value, Tensor) else None
        if tensor is not None and tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append((place, tensor))
        else:
            numbers[place] = float(value if tensor is None else tensor)
    for placed in by_device.values():
        is_single = _SINGLE.issuperset(tensor.dtype for _, tensor in placed)
        dtype = torch.float32 if is_single else torch.float64
        packed = HostCopy(torch.stack([tensor.reshape(()).to(dtype) for _, tensor in placed]))
        for (place, _), number in zip(placed, packed.tolist(), strict=True):
            numbers[place] = number
    return numbers
