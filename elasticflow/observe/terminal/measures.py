"""Words for the values of a step beside its loss: the job's own scalars, items per second, MFU, gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import number, size
from elasticflow.protocol.run_files import GRAD_NORM, MFU, rates_of, scalars_of
from elasticflow.system.records import float_of, int_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.system.records import Record

_MOST_DEVICES = 8


def parts_of_speed(record: Record) -> list[str]:
    """Return `51,200 tokens/s` and `MFU 41.3 %`, as far as the record has them."""
    parts = [f"{per_s:,.0f} {name}/s" for name, per_s in rates_of(record).items()]
    return [*parts, *percent_of_peak(float_of(record, MFU))]


def percent_of_peak(share: float | None) -> list[str]:
    """Return `MFU 41.3 %`, or nothing if it is unknown."""
    return [] if share is None else [f"MFU {100 * share:.1f} %"]


def parts_of_step(record: Record) -> list[str]:
    """Return `kl 3.2012` for each of the job's own scalars, and `grad norm 0.9120`."""
    parts = [f"{name} {number(value)}" for name, value in scalars_of(record).items()]
    norm = norm_of(record)
    return parts if norm is None else [*parts, f"grad norm {norm}"]


def device_rows(devices: Sequence[Record]) -> list[str]:
    """Return `rank 0 (n0, cuda:0): 12.3 GB in tensors, peak 15.1 GB, 16.0 GB reserved, 87 % busy` for each device.

    If there are many, those with the highest peaks are shown.
    """
    rows = []
    shown = sorted(devices, key=lambda device: -int_of(device, "memory_peak"))[:_MOST_DEVICES]
    for device in sorted(shown, key=lambda device: int_of(device, "rank")):
        sizes = (size(int_of(device, f"memory_{name}")) for name in ("allocated", "peak", "reserved"))
        allocated, peak, reserved = sizes
        busy = "" if device.get("utilization") is None else f", {int_of(device, 'utilization')} % busy"
        place = f"rank {int_of(device, 'rank')} ({device.get('node')}, {device.get('device')})"
        rows.append(f"{place}: {allocated} in tensors, peak {peak}, {reserved} reserved{busy}")
    if len(devices) > len(shown):
        rows.append(f"and {len(devices) - len(shown)} with less")
    return rows


def norm_of(record: Record) -> str | None:
    """Return `0.9120`, or `g 0.9120, d 1.2000` for several optimizers; None if the record has no norm."""
    norms = record.get(GRAD_NORM)
    if isinstance(norms, Mapping):
        return ", ".join(f"{name} {number(value)}" for name, value in norms.items()) or None
    return None if norms is None else number(norms)
