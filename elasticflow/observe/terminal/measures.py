"""Words for the values of a step beside its loss: the job's own scalars, items per second, MFU, gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import number
from elasticflow.protocol.run_files import GRAD_NORM, MFU, rates_of, scalars_of
from elasticflow.system.records import float_of

if TYPE_CHECKING:
    from elasticflow.system.records import Record


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


def norm_of(record: Record) -> str | None:
    """Return `0.9120`, or `g 0.9120, d 1.2000` for several optimizers; None if the record has no norm."""
    norms = record.get(GRAD_NORM)
    if isinstance(norms, Mapping):
        return ", ".join(f"{name} {number(value)}" for name, value in norms.items()) or None
    return None if norms is None else number(norms)
