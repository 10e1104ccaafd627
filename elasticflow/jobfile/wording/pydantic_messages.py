"""pydantic's errors in the words of the job file: each mistake once, at its place."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import is_table
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show, to_toml
from elasticflow.jobfile.tables.evaluation import SET_NAME
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.launching import why_refused
from elasticflow.jobfile.tables.types import ONE_OF
from elasticflow.jobfile.text.layers import MovedLayer, value_at
from elasticflow.jobfile.wording.same_values import same_value
from elasticflow.jobfile.wording.type_descriptions import (
    annotation_at,
    choices,
    describe,
    example,
    is_off_without,
    keys_at,
    kind_of_key,
)
from elasticflow.jobfile.wording.unknown_keys import (
    KeySuggestion,
    set_flag,
    suggest_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
# Values that people write who come from training scripts, by key and type.
_HABITS: dict[tuple[str, type], str] = {
    ("dataset.sampler", str): (
        'write sampler = { weights = "module:function" }, a function of the dataset that returns a number for each sample; or '
        'bucket_by = "lengths" or balance_by = "labels", a column of it'
    ),
    ("slurm.gpus", str): 'a number; of a kind: gres = "gpu:a100:4"',
    ("model.loss", dict): "name a function (outputs, targets) of yours that calls it with these arguments",
}


class TableProblem(NamedTuple):
    """A problem of one table, before its place is looked up.

    Attributes:
        at_key: The diagnostic points at the key, not at its value.
        remedy: The remedy; None: the remedy follows from `suggestion`.
    """

    code: str
    message: str
    path: KeyPath
    at_key: bool
    remedy: str | None
    suggestion: KeySuggestion | None = None


def problem_of(error: ErrorDetails, table: str, raw: object) -> TableProblem:
    """Return the problem for one error of a table's model; *raw* is the whole merged dict."""
    path = _real_path((table, *error["loc"]), raw)
    value, kind = value_at(path, raw), error["type"]
    if table == "env" and len(path) > 1 and (refusal := why_refused(str(path[1]))) is not None:
        return TableProblem(
            codes.NOT_PASSABLE, f"{dotted(path[:2])} cannot be set by a job", path[:2], True, refusal
        )
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["loc"] and error["loc"][-1] == "[key]":
        message = f"{dotted(path[:-1])}: {show(path[-1])} must be {kind_of_key(path)}"
        return TableProblem(codes.MALFORMED, message, path, True, None)
    if kind == "bad_key":
        at = (*path, context["key"]) if context["key"] else path
        return TableProblem(
            context["code"], context["message"], at, bool(context.get("at_key")), context.get("remedy")
        )
    if kind == "extra_forbidden":
        return unknown_key(path, value)
    if kind == "missing":
        missing = (*path, str(error["loc"][-1]))
        return _missing(missing)
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        message = f"{dotted(path)} must be {words} {show(context[limit])}, not {show(value)}"
        remedy = None if _is_needed(path, raw) else _remedy(path, value)
        return TableProblem(codes.OUT_OF_RANGE, message, path, False, remedy)
    if kind == "value_error":
        message = f"{dotted(path)} {context['error']}, not {show(value)}"
        return TableProblem(codes.MALFORMED, message, path, False, _remedy(path, value))
    if kind == "too_short":
        return TableProblem(codes.OUT_OF_RANGE, f"{dotted(path)} must not be empty", path, False, None)
    if kind == "finite_number":
        return TableProblem(codes.OUT_OF_RANGE, f"{dotted(path)} must be a finite number", path, False, None)
    return _wrong_value(kind, path, value)


def unknown_key(path: KeyPath, value: object) -> TableProblem:
    """Return the problem of a key that its table, or the file, does not have."""
    *around, key = path
    what = f"unknown key {show(str(key))} in [{dotted(tuple(around))}]"
    if not around:
        what = (
            f"unknown table [{dotted(path)}]"
            if is_table(value)
            else f"unknown key {show(str(key))} outside any table"
        )
    return TableProblem(codes.UNKNOWN_KEY, what, path, True, None, suggest_key(path, value))


def _missing(path: KeyPath) -> TableProblem:
    *around, key = path
    message = f'missing key "{key}" in [{dotted(tuple(around))}]'
    return TableProblem(codes.MISSING, message, tuple(path), True, f"add a line such as: {example(path)}")


def _wrong_value(kind: str, path: KeyPath, value: object) -> TableProblem:
    expected = describe(annotation_at(path))
    message = f"{dotted(path)} must be {expected}, not {show(value)}"
    code = codes.WRONG_TYPE
    if kind == "literal_error" and isinstance(value, str):
        code = codes.OUT_OF_RANGE
    elif kind.startswith("string_") and kind != "string_type":
        code = codes.MALFORMED
    return TableProblem(code, message, path, False, _remedy(path, value))


def _remedy(path: KeyPath, value: object) -> str | None:
    """Return the correct form of a value of the wrong type or form; None if the value does not show it."""
    key, annotation = path[-1], annotation_at(path)
    expected = describe(annotation)
    if value is False and is_off_without(path):
        return "leave it out: it is off without it"
    if (written := _brackets(path, value, expected) or _HABITS.get((dotted(path), type(value)))) is not None:
        return written
    same = same_value(path, value)
    line = to_toml(same) if isinstance(key, int) else f"{key} = {to_toml(same)}"
    if isinstance(same, str) and isinstance(value, str):
        return f"did you mean {to_toml(same)}?"
    if isinstance(same, bool | int | float) and isinstance(value, str):
        return f"without quotes: {line}"
    if same is not None:
        return f"write {line}"
    if _is_off(value) and is_off_without(path):
        return "leave it out: it is off without it"
    if value is True and path[0] == "logging" and key in choices(annotation_at(("logging", "sinks"))):
        return f'write sinks = ["{key}"]'
    if expected == "a table":
        return _as_table(path, value)
    return _of_text(path, value) if isinstance(value, str) else None


def _of_text(path: KeyPath, text: str) -> str | None:
    """Return what to write in place of the path of a Python file, or which letter of a text is foreign."""
    foreign = next((letter for letter in text if not letter.isascii() and letter.isprintable()), None)
    if foreign is not None:
        return f"it has {unicodedata.name(foreign, 'a letter')}, which is not among the letters a to z"
    if not text.endswith(".py"):
        return None
    if path == ("script", "module"):
        return f"write entry = {to_toml(text)}"
    if "module:name" not in describe(annotation_at(path)):
        return None
    module = text.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
    return f'write {path[-1]} = "{module}:NAME", with the NAME of a class or function in that file'


def _as_table(path: KeyPath, value: object) -> str:
    """Return how a table is written in place of *value*, and the keys it takes."""
    names, key = keys_at(path), path[-1]
    if isinstance(key, int) and names[:1] == ["entry"] and isinstance(value, str):
        return f"write {{ entry = {to_toml(value)} }}"
    if len(path) == 1:
        return f"write [{key}] on a line of its own, its keys below"
    if names:
        written = "" if isinstance(key, int) else f"{key} = "
        return f"write {written}{{ {names[0]} = ... }}; it takes: {', '.join(names)}"
    kind = describe(annotation_at((*path, "NAME")))
    if kind == "a table" and (names := keys_at((*path, "NAME"))):
        return (
            f"write {key} = {{ NAME = {{ {names[0]} = ... }} }}; each of its tables takes: {', '.join(names)}"
        )
    return f"write {key} = {{ NAME = ... }}{'' if kind == 'something else' else f'; each value is {kind}'}"


def _brackets(path: KeyPath, value: object, expected: str) -> str | None:
    """Return the header to write where one table is given for an array of tables, or an array for one table."""
    one, several = f"[{dotted(path)}]", f"[[{dotted(path)}]]"
    if is_table(value) and isinstance(value, list) and expected == "a table":
        if describe(annotation_at((*path, "NAME"))) == "a table":
            return f"write [{dotted(path)}.NAME] for each, not {several}"
        pairs = "" if keys_at(path) else ", and below it NAME = ... on a line for each"
        return f"write {one}, not {several}{pairs}"
    if isinstance(value, dict) and expected == "a list (a table, ...)":
        return f"write {several}, not {one}: there may be several; in braces: {path[-1]} = [{{ ... }}]"
    return None


def _is_needed(path: KeyPath, raw: object) -> bool:
    """Return whether a key is the only one given of two keys, one of which is required."""
    pair = ONE_OF.get(str(path[0]), ())
    table = value_at(path[:-1], raw)
    return path[-1] in pair and isinstance(table, dict) and not all(key in table for key in pair)


def _is_off(value: object) -> bool:
    """Return whether a value means "off" or "no limit"."""
    words = value.strip().lower() if isinstance(value, str) else ""
    return (
        value is False
        or value in (-1, 0)
        or words in {"none", "null", "off", "no", "never", "disabled", "0", "-1"}
    )


def _real_path(loc: KeyPath, raw: object) -> KeyPath:
    """Return *loc* without parts that are not in the file: names of union members, a missing last key."""
    path: list[str | int] = []
    for part in loc:
        is_there = (isinstance(raw, dict) and part in raw) or (
            isinstance(raw, list) and isinstance(part, int) and part < len(raw)
        )
        if is_there:
            path.append(part)
            raw = raw[part]  # type: ignore[index]  # just looked
    return tuple(path)


def mixed_problem(table: Mapping[str, object], own: list[str]) -> TableProblem:
    """Return the problem of an [evaluation] that has keys of its own beside tables of sets."""
    sets = [key for key, value in table.items() if key not in own and isinstance(value, dict)]
    several = len(own) > 1
    message = (
        f"[evaluation] is one set by its {'keys' if several else 'key'} {', '.join(own)}, and [evaluation.{sets[0]}] "
        "makes it several"
    )
    if "entry" in own:
        free = next(name for name in ("val", "test", "main", "first") if name not in sets)
        remedy = f"give each set a table: write [evaluation.{free}] above {' and '.join(own[:2])} instead of [evaluation]"
    else:
        tables = ", ".join(f"[evaluation.{name}]" for name in sets)
        remedy = f"keys of [evaluation] are not shared by its sets: write {', '.join(own)} in {tables}"
    return TableProblem(codes.EVALUATION_SETS, message, ("evaluation", sets[0]), True, remedy)


def problems_of_set(name: str, error: ValidationError | None, raw: TomlTable) -> Iterator[TableProblem]:
    """Yield the problems of an evaluation set's name, and those of its table in *error*."""
    path = ("evaluation", name)
    if not re.fullmatch(SET_NAME, name):
        message = f"evaluation: {show(name)} must be a name of at most 50 letters, digits and _, like val"
        yield TableProblem(codes.MALFORMED, message, path, True, None)
    if error is None:
        return
    if not isinstance(value_at(path, raw), dict):
        yield unknown_key(path, value_at(path, raw))
        return
    for each in error.errors(include_url=False, include_input=False):
        yield problem_of({**each, "loc": (name, *each["loc"])}, "evaluation", raw)


def place_problems(source: Source, problems: list[TableProblem]) -> list[Diagnostic]:
    """Return the problems as diagnostics at their places, each mistake once."""
    suggested = {key for each in problems if each.suggestion for key in each.suggestion.keys}
    for name, table in source.raw.items():
        if isinstance(table, dict) and name not in Job.model_fields and "extends" in table:
            # A header above it takes the file's first lines in, and all that the other file has is missing.
            remedy = f"it stands below [{name}]: write extends at the top of the file, above all tables"
            kept = [each for each in problems if each.path != (name,) and not _wanted(each)]
            message = "extends is a key of the file, not of a table"
            problems = [*kept, TableProblem(codes.UNKNOWN_KEY, message, (name, "extends"), True, remedy)]
    if ("extends",) in suggested:  # the file it names may have the missing keys
        problems = [each for each in problems if not _wanted(each)]
    kept = [each for each in problems if suggested.isdisjoint(_wanted(each))]
    wrong = {each.path for each in kept if each.code == codes.OUT_OF_RANGE}
    kept = [each for each in kept if each.code != codes.EXCLUSIVE or each.path not in wrong]
    return [_diagnostic(source, _at_key_below(source, each)) for each in kept]


def _wanted(problem: TableProblem) -> list[KeyPath]:
    """Return the keys that are missing by the problem; any one of them is enough."""
    if problem.code == codes.MISSING:
        return [problem.path]
    if problem.code == codes.EXCLUSIVE and len(problem.path) == 1:
        return [(*problem.path, key) for key in ONE_OF[str(problem.path[0])]]
    return []


def _at_key_below(source: Source, problem: TableProblem) -> TableProblem:
    """Return the problem of a missing key as a problem of that key itself, if a table further down has the key."""
    for wanted in _wanted(problem):
        table = source.raw.get(str(wanted[0]))
        if len(wanted) != 2 or not isinstance(table, dict):
            continue
        for path in _below(table, (wanted[0],)):
            is_at_home = path[-1] in keys_at(path[:-1])  # as the entry of an evaluation's collate
            if path[-1] == wanted[-1] and len(path) > 2 and not is_at_home:
                message = f"{problem.message}: {path[-1]} stands in [{dotted(path[:-1])}]"
                return problem._replace(
                    message=message, path=path, at_key=True, remedy=None, suggestion=KeySuggestion((wanted,))
                )
    return problem


def _below(table: TomlTable, path: KeyPath) -> Iterator[KeyPath]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _below(value, (*path, key))


def _diagnostic(source: Source, problem: TableProblem) -> Diagnostic:
    path, suggestion, remedy = problem.path, problem.suggestion, problem.remedy
    diagnostic = source.problem(problem.code, problem.message, path, at_key=problem.at_key, remedy=remedy)
    if diagnostic.is_flag:
        return diagnostic._replace(help=_for_flag(source, problem) or remedy)
    is_moved = any(isinstance(layer, MovedLayer) and layer.look(path) for layer in source.layers)
    if suggestion is None:
        return diagnostic
    if is_moved:
        return diagnostic._replace(help=suggestion.in_axis())
    return diagnostic._replace(help=suggestion.in_file(path, source))


def _for_flag(source: Source, problem: TableProblem) -> str | None:
    value = value_at(problem.path, source.raw)
    if problem.suggestion is not None:
        return problem.suggestion.in_flag(value)
    meant = same_value(problem.path, value) if problem.remedy and not problem.at_key else None
    return None if meant is None or meant == value else set_flag(problem.path, to_toml(meant))
