"""What pydantic finds, said in the words of the job file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import is_table, nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show, written
from elasticflow.jobfile.tables.misplaced_keys import Place, place_of
from elasticflow.jobfile.tables.repairs import key_repaired, repaired, with_units
from elasticflow.jobfile.tables.type_descriptions import (
    annotation_at,
    choices,
    describe,
    is_off_without,
    kind_of_key,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

    from elasticflow.jobfile.diagnostics.positions import KeyPath

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_EXAMPLES = {"entry": '"examples.mnist:Net"', "name": '"mnist"'}


class Finding(NamedTuple):
    """A problem of one table, before its place is looked up.

    Attributes:
        code: Code of the diagnostic.
        message: What is wrong.
        path: The key it is about.
        at_key: Point at the key, not at its value.
        remedy: What to do; None: what `belongs` says.
        belongs: Where the key belongs that stands here, if that is known.
    """

    code: str
    message: str
    path: KeyPath
    at_key: bool
    remedy: str | None
    belongs: Place | None = None


def find(error: ErrorDetails, table: str, raw: object) -> Finding:
    """Return the finding for one error of a table's model; *raw* is the whole merged dict."""
    path = _real_path((table, *error["loc"]), raw)
    value, kind = _value_at(path, raw), error["type"]
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["loc"] and error["loc"][-1] == "[key]":
        message = f"{dotted(path[:-1])}: {show(path[-1])} must be {kind_of_key(path)}"
        near = key_repaired(path)
        return Finding(codes.MALFORMED, message, path, True, f"did you mean {show(near)}?" if near else None)
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
        remedy = None if _is_needed(path, raw) else _remedy(path, value)
        return Finding(codes.OUT_OF_RANGE, message, path, False, remedy)
    if kind == "value_error":
        message = f"{dotted(path)} {context['error']}, not {show(value)}"
        return Finding(codes.MALFORMED, message, path, False, _remedy(path, value))
    if kind == "too_short":
        return Finding(codes.OUT_OF_RANGE, f"{dotted(path)} must not be empty", path, False, None)
    if kind == "finite_number":
        return Finding(codes.OUT_OF_RANGE, f"{dotted(path)} must be a finite number", path, False, None)
    return _wrong_value(kind, path, value)


def unknown_key(path: KeyPath, value: object) -> Finding:
    """Return the finding for a key that its table, or the file, does not have."""
    *around, key = path
    what = f"unknown key {show(str(key))} in [{dotted(tuple(around))}]"
    if not around:
        what = (
            f"unknown table [{dotted(path)}]"
            if is_table(value)
            else f"unknown key {show(str(key))} outside any table"
        )
    return Finding(codes.UNKNOWN_KEY, what, path, True, None, place_of(path, value))


def _missing(path: KeyPath) -> Finding:
    *around, key = path
    message = f'missing key "{key}" in [{dotted(tuple(around))}]'
    example = f"{key} = {_EXAMPLES.get(str(key), 256)}"
    return Finding(codes.MISSING, message, tuple(path), True, f"add a line such as: {example}")


def _wrong_value(kind: str, path: KeyPath, value: object) -> Finding:
    expected = describe(annotation_at(path))
    message = f"{dotted(path)} must be {expected}, not {show(value)}"
    code = codes.WRONG_TYPE
    if kind == "literal_error" and isinstance(value, str):
        code = codes.OUT_OF_RANGE
    elif kind.startswith("string_") and kind != "string_type":
        code = codes.MALFORMED
    return Finding(code, message, path, False, _remedy(path, value))


def _remedy(path: KeyPath, value: object) -> str | None:
    """Return how a value of the wrong type or form is written rightly."""
    key, annotation = path[-1], annotation_at(path)
    expected = describe(annotation)
    if is_table(value) and isinstance(value, list) and expected == "a table":
        return f"write [{dotted(path)}], not [[{dotted(path)}]]"
    meant = repaired(path, value)
    line = written(meant) if isinstance(key, int) else f"{key} = {written(meant)}"
    if isinstance(meant, str) and isinstance(value, str):
        return f"did you mean {written(meant)}?"
    if isinstance(meant, bool | int | float) and isinstance(value, str):
        return f"without quotes: {line}"
    if meant is not None:
        return f"write {line}"
    if (
        isinstance(value, int | float | str)
        and not isinstance(value, bool)
        and (texts := with_units(path, str(value).strip()))
    ):
        return f"with a unit: {' or '.join(f'{key} = {written(each)}' for each in texts)}"
    if _is_off(value) and is_off_without(path):
        return "leave it out: it is off without it"
    if expected == "a table" and get_args(annotation) and (names := _names(value)):
        line = ", ".join(f'{name} = "module:{name}"' for name in names)
        return f"with the module of each: {key} = {{ {line} }}"
    if expected == "a table":
        return f"write [{dotted(path)}] on a line of its own, its keys below"
    if isinstance(value, str) and "module:name" in expected and re.fullmatch(r"[\w./-]+", value):
        return _with_name(key, value)
    known = [str(each) for each in choices(annotation)]
    near = nearest(value, known) if isinstance(value, str) else []
    return f'did you mean "{near[0]}"?' if near else None


def _with_name(key: str | int, value: str) -> str:
    """Return how a module, or a bare name, becomes an entry point."""
    if value.endswith(".py"):
        module = value.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        return f'write {key} = "{module}:NAME", with the NAME of a class or function in that file'
    name = re.sub(r"\W+", "_", value).strip("_")
    return f'write {key} = "module:{name}", with the module that defines it; a function of yours will do'


def _is_needed(path: KeyPath, raw: object) -> bool:
    """Return whether a key is the only one given of two, one of which must be."""
    from elasticflow.jobfile.tables.types import ONE_OF

    pair = ONE_OF.get(str(path[0]), ())
    table = _value_at(path[:-1], raw)
    return path[-1] in pair and isinstance(table, dict) and not all(key in table for key in pair)


def _is_off(value: object) -> bool:
    """Return whether a value says that something is not wanted, or not limited."""
    words = value.strip().lower() if isinstance(value, str) else ""
    return (
        value is False
        or value in (-1, 0)
        or words in {"none", "null", "off", "no", "never", "disabled", "0", "-1"}
    )


def _names(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [each for each in texts if isinstance(each, str) and each.isidentifier()]


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
