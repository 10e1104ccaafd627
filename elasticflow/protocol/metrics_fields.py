"""The fields of a line of metrics.jsonl that are ours; what else stands in a step's line, the job's own step returned."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNT, GRAD_NORM, MFU, RATE = "count", "grad_norm", "mfu", "_per_s"
"""Of a step's line, where they are known: over how many items the loss is; the norm of the gradient; the share of the
devices' peak; and the end of the field that has the items of a second, as in `tokens_per_s`."""

_OURS = frozenset(
    {
        *(
            "timestamp",
            "level",
            "event",
            "origin",
            "job",
            "run_id",
            "launch",
            "generation",
            "node",
            "rank",
            "world_size",
        ),
        *("step", "epoch", "in_epoch", "samples", "loss", "lr", "time", "seconds", "stop"),
        *("eval", "eval_raw", "weights", "best", COUNT, GRAD_NORM, MFU),
    }
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,99}")


def is_ours(name: str) -> bool:
    """Whether *name* is a field of ours, which no scalar of a job may be called."""
    return name in _OURS or name.endswith(RATE)


def is_name(name: str) -> bool:
    """Whether a scalar of a job may be called *name*, as far as its letters go."""
    return _NAME.fullmatch(name) is not None


def scalars_of(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what the job's own step returned, out of a step's line; None stands for what is not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in record.items()
        if not is_ours(name) and (value is None or _is_number(value))
    }


def rates_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return how many items a second a step's line tells, by their name: `{"tokens": 51200.0}`."""
    return {
        name.removesuffix(RATE): float(value)
        for name, value in record.items()
        if name.endswith(RATE) and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
