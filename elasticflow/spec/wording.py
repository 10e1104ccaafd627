"""What pydantic finds, said in the words of the job file (floor 1, pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.spec import codes
from elasticflow.spec.expectations import annotation_at, choices, describe, keys_at, kind_of_key
from elasticflow.spec.findings.remedies import entry_help, is_table, name_help, nearest, type_help, unit_help
from elasticflow.spec.findings.showing import dotted, show
from elasticflow.spec.job import Job
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
        message = f"{dotted(path[:-1])}: {show(path[-1])} must be {kind_of_key(path)}"
        return Finding(codes.MALFORMED, message, path, True, name_help(path[-1], kind_of_key(path)))
    if kind == "bad_key":
        at = (*path, context["key"])
        return Finding(context["code"], context["message"], at, False, context.get("remedy"))
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
        return Finding(codes.MALFORMED, message, path, False, unit_help(value))
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
    near = nearest(name, known)
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
        near = nearest(value, known)
        remedy = f'did you mean "{near[0]}"?' if near else None
        return Finding(codes.OUT_OF_RANGE, message, path, False, remedy)
    if kind.startswith("string_") and kind != "string_type":
        remedy = entry_help(value) or name_help(value, expected)
        return Finding(codes.MALFORMED, message, path, False, remedy)
    return Finding(codes.WRONG_TYPE, message, path, False, type_help(path, value, expected))


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
