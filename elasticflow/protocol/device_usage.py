"""Memory and use of an accelerator, under the names that metrics.jsonl, state.json and `status --format json` have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceUsage(NamedTuple):
    """Memory and use of a worker's accelerator.

    Attributes:
        memory_allocated: Bytes in tensors of the worker.
        memory_reserved: Bytes that its allocator has taken from the device.
        memory_peak: Most bytes in tensors since the worker began.
        utilization: Percentage of time in which kernels ran, of all processes; None: unknown.
    """

    memory_allocated: int
    memory_reserved: int
    memory_peak: int
    utilization: int | None = None


def to_numbers(usage: DeviceUsage | None) -> Sequence[int]:
    """Return the fields of *usage* as numbers for shared memory, with -1 for each that is unknown."""
    return [-1 if field is None else field for field in usage or [None] * len(DeviceUsage._fields)]


def from_numbers(numbers: Sequence[int]) -> DeviceUsage | None:
    """Return the usage of which `to_numbers` made *numbers*."""
    allocated, reserved, peak, utilization = numbers
    if allocated < 0:
        return None
    return DeviceUsage(allocated, reserved, peak, None if utilization < 0 else utilization)
