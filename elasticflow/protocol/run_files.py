"""Forms of what the processes of a run write for one another: lines of metrics.jsonl, imports.json, records for views."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow.system import atomic_files
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.protocol.messages import PrintedLine

COUNT, GRAD_NORM, MFU, RATE = "count", "grad_norm", "mfu", "_per_s"
"""Of a step's line, where they are known: over how many items the loss is; the norm of the gradient; the share of the
devices' peak; and the end of the field that has the items of a second, as in `tokens_per_s`."""

DEVICE_USAGE = "memory_allocated", "memory_reserved", "memory_peak", "utilization"
"""Of a step's line every few seconds, where the model is on an accelerator: bytes in tensors, bytes taken from the device,
most bytes in tensors so far, and the percentage of time in which kernels ran, where that is known; of rank 0's device."""

# Fields of all lines of metrics.jsonl; the job's own step returned the other fields of a step's line.
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
        *("eval", "eval_raw", "weights", "best", COUNT, GRAD_NORM, MFU, *DEVICE_USAGE),
    }
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,99}")
KNOWN = "known"
PRINTED = "printed"
SHOWN_OF_STATE = ("epochs", "budget_left", "activities")
"""Fields of state.json that no event tells.

- `epochs`: passes over the data in all, if the job says them.
- `budget_left`: restarts left in the budget.
- `activities`: by node, what it has been at for longer than a moment: `phase`, `subject` and `step` as in `Activity`, and
  `since`, the unix time at which that began.
"""


def is_ours(name: str) -> bool:
    """True if *name* is a field of ours, which no scalar of a job may be called."""
    return name in _OURS or name.endswith(RATE)


def is_name(name: str) -> bool:
    """True if the letters of *name* are allowed in the name of a job's scalar."""
    return _NAME.fullmatch(name) is not None


def scalars_of(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the scalars that the job's own step returned, from a step's line; None stands for a value that is not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in record.items()
        if not is_ours(name) and (value is None or _is_number(value))
    }


def rates_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the items per second of a step's line, by their name: `{"tokens": 51200.0}`."""
    return {
        name.removesuffix(RATE): float(value)
        for name, value in record.items()
        if name.endswith(RATE) and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_imports(path: Path) -> None:
    """Write the names of the modules that this process has imported, in that order; the file is replaced whole.

    On a full disk nothing is written: standbys import less then.
    """
    names = [
        name
        for name, module in tuple(sys.modules.items())
        if name != "__main__" and getattr(module, "__spec__", None) is not None
    ]
    with suppress(OSError):
        atomic_files.replace(path, (json.dumps({"modules": names}).encode(),), sync=False)


def read_imports(path: Path) -> list[str]:
    """Return the names that `write_imports` wrote; none if the file is absent or damaged: standbys import less then."""
    with suppress(OSError, BadJsonError):
        names = parse(path.read_bytes()).get("modules")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return []


def known_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the facts that *state*, of state.json, holds beside the events."""
    return {KNOWN: {name: state.get(name) for name in SHOWN_OF_STATE}}


def printed_record(lines: Sequence[PrintedLine], left_out: int) -> dict[str, Any]:
    """Return the record of the lines that rank 0 printed, and of the number left out before them."""
    return {PRINTED: [line._asdict() for line in lines], "left_out": left_out}


def is_only_shown(record: Mapping[str, Any]) -> bool:
    """Return whether *record* stands in no log."""
    return KNOWN in record or PRINTED in record
