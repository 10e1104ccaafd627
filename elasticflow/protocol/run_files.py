"""Forms of what the processes of a run write for one another: lines of metrics.jsonl, imports.json, records for views."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.protocol.worker_environment import DeviceUsage
from elasticflow.system import atomic_files
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.protocol.messages import PrintedLine

COUNT, GRAD_NORM, MFU, RATE = "count", "grad_norm", "mfu", "_per_s"
"""Of a step's line, where they are known: over how many items the loss is; the norm of the gradient; the share of the
devices' peak; and the end of the field that has the items of a second, as in `tokens_per_s`."""

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
        *("eval", "eval_raw", "weights", "best", "best_of", COUNT, GRAD_NORM, MFU, *DeviceUsage._fields),
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
RESUME_COMMAND = "ELASTICFLOW_RESUME_COMMAND"
"""Variable of the process that leads: what to tell people. A batch script sets it, or whatever else starts the nodes."""


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


def place_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the place of a line of metrics.jsonl, which has a step; lines are in the order of their places.

    A step's line is before its evaluations', of which a script may make several after one step: their names tell them apart.
    """
    metrics = record.get("eval")
    if isinstance(metrics, dict):
        return record["step"], True, " ".join(metrics)
    return record["step"], "eval" in record


def rates_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the items per second of a step's line, by their name: `{"tokens": 51200.0}`."""
    return {
        name.removesuffix(RATE): float(value)
        for name, value in record.items()
        if name.endswith(RATE) and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Preparation(NamedTuple):
    """All that a standby prepares, as a worker had it after its first step.

    Attributes:
        modules: Modules that the worker has imported, in that order.
        variables: Variables on which the bits of a GPU's libraries may depend; None if they are not known.
        device: Type of the device that it trains on; empty if it is not known.
    """

    modules: list[str]
    variables: dict[str, str] | None = None
    device: str = ""


def write_preparation(path: Path, variables: Mapping[str, str], device: str) -> None:
    """Write the `Preparation` of a process that is to replace this worker; the file is replaced whole.

    The modules are those that this process has imported. On a full disk nothing is written: standbys import less then.
    """
    names = [
        name
        for name, module in tuple(sys.modules.items())
        if name != "__main__" and getattr(module, "__spec__", None) is not None
    ]
    record = {"modules": names, "variables": dict(variables), "device": device}
    with suppress(OSError):
        atomic_files.replace(path, (json.dumps(record).encode(),), sync=False)


def read_preparation(path: Path) -> Preparation:
    """Return the `Preparation` in the file; an empty one if the file is absent or damaged: standbys then prepare less."""
    with suppress(OSError, BadJsonError):
        record = parse(path.read_bytes())
        names, variables, device = (record.get(name) for name in ("modules", "variables", "device"))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            is_known = isinstance(variables, dict) and all(isinstance(v, str) for v in variables.values())
            kind = device if isinstance(device, str) else ""
            return Preparation(names, variables if is_known else None, kind)
    return Preparation([])


def known_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the facts in *state*, of state.json, that no event has."""
    return {KNOWN: {name: state.get(name) for name in SHOWN_OF_STATE}}


def printed_record(lines: Sequence[PrintedLine], left_out: int) -> dict[str, Any]:
    """Return the record of the lines that rank 0 printed, and of the number left out before them."""
    return {PRINTED: [line._asdict() for line in lines], "left_out": left_out}


def is_only_shown(record: Mapping[str, Any]) -> bool:
    """Return whether *record* stands in no log."""
    return KNOWN in record or PRINTED in record


def told_command() -> str | None:
    """Return the command that resumes the run, if whoever started this process set one."""
    return os.environ.get(RESUME_COMMAND) or None


def resume_command(run_id: str, told: object) -> str:
    """Return the command that continues a run; *told* is the command that its launch recorded."""
    return told if isinstance(told, str) and told else f"elasticflow resume {run_id}"
