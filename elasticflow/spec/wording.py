"""What pydantic finds, said in the words of the job file (floor 1, pure)."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.spec import codes
from elasticflow.spec.expectations import annotation_at, choices, describe, keys_at, kind_of_key
from elasticflow.spec.job import Job
from elasticflow.spec.showing import dotted, show
from elasticflow.spec.torchrun_options import DECIDED_ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

    from elasticflow.spec.positions import KeyPath

# Words people know from elsewhere, and what they are called here.
_ELSEWHERE = {
    "amp": "train.precision",
    "batch_size": "dataset.global_batch_size",
    "checkpoint": "snapshots",
    "checkpoints": "snapshots",
    "data": "dataset",
    "eval": "evaluation",
    "eval_every": "evaluation.every",
    "keep_last": "snapshots.keep = { last = 3 }",
    "learning_rate": "optimizer.args = { lr = 1e-3 }",
    "log_level": "logging.level",
    "lr": "optimizer.args = { lr = 1e-3 }",
    "max_epochs": "train.epochs",
    "max_norm": "optimizer.clip_grad_norm",
    "max_restarts": "restarts.budget",
    "max_steps": "train.steps",
    "nnodes": "nodes.min and nodes.max",
    "num_epochs": "train.epochs",
    "nproc": "nodes.nproc_per_node",
    "rdzv_endpoint": "nodes.endpoint",
    "save_every": "snapshots.every",
    "scheduler": "lr_scheduler",
    "target": "entry",
    "workers": "nodes.nproc_per_node, or dataset.num_workers for loader processes",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


class Finding(NamedTuple):
    """A problem of one table, before its place is looked up.

    Attributes:
        code: Code of the diagnostic.
        message: What is wrong.
        path: The key it is about.
        at_key: Point at the key, not at its value.
        remedy: What to do.
    """

    code: str
    message: str
    path: KeyPath
    at_key: bool
    remedy: str | None


def find(error: ErrorDetails, table: str, raw: object) -> Finding:
    """Return the finding for one error of a table's model; *raw* is the whole merged dict."""
    path = _real_path((table, *error["loc"]), raw)
    value, kind = _value_at(path, raw), error["type"]
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["loc"] and error["loc"][-1] == "[key]":
        return Finding(
            codes.MALFORMED,
            f"{dotted(path[:-1])}: {show(path[-1])} must be {kind_of_key(path)}",
            path,
            True,
            None,
        )
    if kind == "bad_key":
        at = (*path, context["key"])
        return Finding(context["code"], context["message"], at, False, None)
    if kind == "extra_forbidden":
        return unknown_key(path, value)
    if kind == "missing":
        missing = (*path, str(error["loc"][-1]))
        return _missing(missing)
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        message = f"{dotted(path)} must be {words} {show(context[limit])}, not {show(value)}"
        return Finding(codes.OUT_OF_RANGE, message, path, False, None)
    if kind == "value_error":
        message = f"{dotted(path)} {context['error']}, not {show(value)}"
        return Finding(codes.MALFORMED, message, path, False, _unit_help(value))
    if kind == "too_short":
        return Finding(codes.OUT_OF_RANGE, f"{dotted(path)} must not be empty", path, False, None)
    if kind == "finite_number":
        return Finding(codes.OUT_OF_RANGE, f"{dotted(path)} must be a finite number", path, False, None)
    return _wrong_value(kind, path, value)


def unknown_key(path: KeyPath, value: object) -> Finding:
    """Return the finding for a key that its table, or the file, does not have."""
    *around, key = path
    name = str(key)
    known = keys_at(tuple(around))
    what = f"unknown key {show(name)} in [{dotted(tuple(around))}]"
    if not around:
        what = (
            f"unknown table [{dotted(path)}]"
            if is_table(value)
            else f"unknown key {show(name)} outside any table"
        )
    near = difflib.get_close_matches(name, known, 1)
    homes = [table for table in Job.model_fields if name in keys_at((table,))]
    if tuple(around) == ("torchrun",) and name.replace("-", "_") in DECIDED_ELSEWHERE:
        remedy = DECIDED_ELSEWHERE[name.replace("-", "_")]
    elif near:
        remedy = f'did you mean "{near[0]}"?'
    elif name in _ELSEWHERE:
        remedy = f"this is {_ELSEWHERE[name]} here"
    elif homes:
        remedy = f'"{name}" belongs in {" or ".join(f"[{home}]" for home in homes)}'
    elif around:
        remedy = f"[{dotted(tuple(around))}] takes: {', '.join(known)}"
    else:
        remedy = f"a job file has the tables: {', '.join(known)}"
    return Finding(codes.UNKNOWN_KEY, what, path, True, remedy)


def is_table(value: object) -> bool:
    """Return whether a value is a table, or an array of them."""
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _missing(path: KeyPath) -> Finding:
    *around, key = path
    message = f'missing key "{key}" in [{dotted(tuple(around))}]'
    example = {"entry": 'entry = "examples.mnist:Net"', "name": 'name = "mnist"'}.get(
        str(key), f"{key} = 256"
    )
    return Finding(codes.MISSING, message, tuple(path), True, f"add a line such as: {example}")


def _wrong_value(kind: str, path: KeyPath, value: object) -> Finding:
    expected = describe(annotation_at(path))
    message = f"{dotted(path)} must be {expected}, not {show(value)}"
    if kind == "literal_error" and isinstance(value, str):
        known = [str(choice) for choice in choices(annotation_at(path))]
        near = difflib.get_close_matches(value, known, 1)
        remedy = f'did you mean "{near[0]}"?' if near else None
        return Finding(codes.OUT_OF_RANGE, message, path, False, remedy)
    if kind.startswith("string_") and kind != "string_type":
        return Finding(codes.MALFORMED, message, path, False, _entry_help(value))
    return Finding(codes.WRONG_TYPE, message, path, False, _type_help(path, value, expected))


def _type_help(path: KeyPath, value: object, expected: str) -> str | None:
    key = path[-1]
    if is_table(value) and expected == "a table":
        return f"write [{dotted(path)}], not [[{dotted(path)}]]"
    if expected == "a table":
        return (
            f"write [{key}] on a line of its own, its keys below"
            if len(path) == 1
            else f"write {key} = {{ ... }}"
        )
    if isinstance(value, int | float) and "unit" in expected:
        return f'with a unit: {key} = "{value} steps" or {key} = "{value} min"'
    if not isinstance(value, str):
        return None
    if value.lower() in {"true", "false", "yes", "no"} and "true or false" in expected:
        return "write true or false, without quotes"
    if value.replace("_", "").lstrip("+-").isdigit() and "number" in expected:
        return f"without quotes: {key} = {value}"
    return None


def _entry_help(value: object) -> str | None:
    if isinstance(value, str) and ":" not in value and "." in value:
        module, _, name = value.rpartition(".")
        return f'did you mean "{module}:{name}"? A colon stands between module and name'
    return None


def _unit_help(value: object) -> str | None:
    number, _, unit = value.strip().partition(" ") if isinstance(value, str) else ("", "", "")
    units = (
        "steps",
        "epochs",
        "samples",
        "min",
        "h",
        "d",
        "s",
        "step",
        "epoch",
        "sample",
        "minutes",
        "hours",
        "seconds",
        "days",
    )
    if unit not in units and (near := difflib.get_close_matches(unit, units, 1)):
        return f'did you mean "{number} {near[0]}"?'
    if isinstance(value, str) and value.strip().isdigit():
        return f'add a unit: "{value.strip()} steps" or "{value.strip()} min"'
    return None


def _real_path(loc: KeyPath, raw: object) -> KeyPath:
    """Return *loc* without what is not in the file: names of union members, a missing last key."""
    path: list[str | int] = []
    for part in loc:
        is_there = (isinstance(raw, dict) and part in raw) or (
            isinstance(raw, list) and isinstance(part, int) and part < len(raw)
        )
        if is_there:
            path.append(part)
            raw = raw[part]  # type: ignore[index]  # just looked
    return tuple(path)


def _value_at(path: KeyPath, raw: Any) -> object:
    for part in path:
        raw = raw[part]
    return raw
