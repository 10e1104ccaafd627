"""Free tables (`args`, `options`), which no pydantic model checks: their values, and the objects among arguments.

An object: `config = { entry = "model:GPTConfig", args = { n_layer = 4 } }`.

A table is an object if its keys are `entry` and, where wanted, `args` and `partial`, and its `entry` is a text of the form
`package.module:attribute`. Every other table is a dict. A dict that looks like an object is written as an object:
`{ entry = "builtins:dict", args = { entry = "a:b" } }`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import keyword
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.tables.evaluation import set_tables
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.jobfile.text.layers import table_at, value_at
from elasticflow.jobfile.type_checks.annotations import DatasetValue, ObjectTable
from elasticflow.system import redaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source

_ARGS_OF = ("model", "optimizer", "lr_scheduler", "dataset")
_KEYS = ("entry", "args", "partial")
_TARGETS = {"_target_": "Hydra's", "class_path": "jsonargparse's and LightningCLI's"}
_FORM = 'an object is { entry = "module:name", args = { ... } }, with partial = true for a functools.partial'


class ObjectArgument(NamedTuple):
    """One object of the job file.

    Attributes:
        entry: `package.module:attribute`.
        is_partial: The object is a `functools.partial`, not the result of the call.
    """

    path: KeyPath
    entry: str
    args: TomlTable
    is_partial: bool


def argument_tables(raw: TomlTable) -> Iterator[tuple[KeyPath, TomlTable]]:
    """Yield every table of arguments of a merged job, which may hold objects, except the arguments of objects."""
    for name in _ARGS_OF:
        yield (name, "args"), table_at(raw, name, "args")
    for path, table in set_tables(raw):
        yield (*path, "args"), table_at(table, "args")
        for name, metric in table_at(table, "metrics").items():
            if isinstance(metric, dict):
                yield (*path, "metrics", name, "args"), table_at(metric, "args")
    for name in table_at(raw, "hooks"):
        yield ("hooks", name, "args"), table_at(raw, "hooks", name, "args")
    arrays = (tables_in_array(raw, *path) for path in (("optimizer", "groups"), ("dataset", "mix")))
    for path, table in (*itertools.chain(*arrays), *collate_tables(raw)):
        yield (*path, "args"), table_at(table, "args")


def dataset_values(raw: TomlTable) -> Iterator[tuple[KeyPath, DatasetValue]]:
    """Yield every argument of a merged job that stands for a value of the training data, and its key."""
    for path, arguments in argument_tables(raw):
        yield from _dataset_values(arguments, path)


def _dataset_values(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, DatasetValue]]:
    if isinstance(value, DatasetValue):
        yield path, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _dataset_values(inner, (*path, key))


def tables_in_array(raw: TomlTable, table: str, key: str) -> Iterator[tuple[KeyPath, TomlTable]]:
    """Yield the tables of an array of tables, such as `[[optimizer.groups]]`."""
    array = table_at(raw, table).get(key)
    for number, each in enumerate(array if isinstance(array, list) else []):
        if isinstance(each, dict):
            yield (table, key, number), each


def collate_tables(raw: TomlTable) -> Iterator[tuple[KeyPath, TomlTable]]:
    """Yield the collators with arguments: `collate` of the training data and of evaluation sets."""
    for path, table in ((("dataset",), table_at(raw, "dataset")), *set_tables(raw)):
        if isinstance(collate := table.get("collate"), dict):
            yield (*path, "collate"), collate


def object_of(value: object, path: KeyPath = ()) -> ObjectArgument | None:
    """Return the object that a value among arguments stands for; None for a plain value."""
    if not isinstance(value, dict) or not _is_meant(value):
        return None
    args, is_partial = value.get("args", {}), value.get("partial", False)
    if not isinstance(args, dict) or not isinstance(is_partial, bool):
        return None  # refused by `check_objects`
    return ObjectArgument(path, value["entry"], args, is_partial)


def _is_meant(value: TomlTable) -> bool:
    entry = value.get("entry")
    return isinstance(entry, str) and value.keys() <= set(_KEYS) and re.fullmatch(ENTRY, entry) is not None


def objects_in(arguments: object, path: KeyPath) -> Iterator[ObjectArgument]:
    """Yield every object among arguments, also inside other objects, lists and dicts; outer objects first."""
    for inner_path, value in _tables_in(arguments, path):
        argument = object_of(value, inner_path)
        if argument is not None:
            yield argument


def objects_of(raw: TomlTable) -> Iterator[ObjectArgument]:
    """Yield every object of a merged job."""
    for path, arguments in argument_tables(raw):
        yield from objects_in(arguments, path)


def with_objects_marked(value: Any) -> Any:
    """Return a value of the job file with its objects marked as `ObjectTable`."""
    if isinstance(value, dict):
        inner = {key: with_objects_marked(each) for key, each in value.items()}
        return ObjectTable(inner) if object_of(value) else inner
    return [with_objects_marked(each) for each in value] if isinstance(value, list) else value


def check_objects(source: Source) -> Iterator[Diagnostic]:
    """Yield the problems of objects, and of tables that are dicts though they look like objects."""
    for place, arguments in argument_tables(source.raw):
        for path, value in _tables_in(arguments, place):
            if isinstance(value.get("entry"), str):
                yield from _wrong(source, path, value)
            elif any(isinstance(value.get(word), str) for word in _TARGETS):
                yield _of_another_tool(source, path, value)


def _of_another_tool(source: Source, path: KeyPath, value: TomlTable) -> Diagnostic:
    """Return the diagnostic of an object in the notation of Hydra or jsonargparse, which would be a plain dict."""
    word = next(word for word in _TARGETS if isinstance(value.get(word), str))
    message = f"{dotted(path)} is a plain dict: `{word}` is {_TARGETS[word]} word for `entry`"
    return source.problem(
        codes.OBJECT_ARGUMENT, message, (*path, word), at_key=True, severity="warning", remedy=_FORM
    )


def _wrong(source: Source, path: KeyPath, value: TomlTable) -> Iterator[Diagnostic]:
    entry, others = str(value["entry"]), [key for key in value if key not in _KEYS]
    if _is_meant(value):
        for key, kind, words in (("args", dict, "a table"), ("partial", bool, "true or false")):
            if not isinstance(value.get(key, kind()), kind):
                message = f"{dotted((*path, key))} must be {words}, not {show(value[key])}"
                yield source.problem(codes.OBJECT_ARGUMENT, message, (*path, key), remedy=_FORM)
    elif others and re.fullmatch(ENTRY, entry):
        names = ", ".join(others)
        message = f"{dotted(path)} is a plain dict: beside `entry` it holds {names}"
        remedy = f"{_FORM}: its arguments stand in args"
        yield source.problem(codes.OBJECT_ARGUMENT, message, path, severity="warning", remedy=remedy)
    elif not others and len(value) > 1:
        message = f"{dotted(path)} is a plain dict: its `entry` is {show(entry)}, which names no attribute of a module"
        head, _, last = entry.removesuffix(".py").rpartition(".")
        near = f"{head}:{last}" if head and re.fullmatch(ENTRY, f"{head}:{last}") else None
        remedy = f"{f'did you mean {show(near)}? ' if near else ''}{_FORM}"
        yield source.problem(
            codes.OBJECT_ARGUMENT, message, (*path, "entry"), severity="warning", remedy=remedy
        )


def _tables_in(
    value: object, path: KeyPath, *, is_arguments: bool = True
) -> Iterator[tuple[KeyPath, TomlTable]]:
    """Yield every table below a table of arguments, except tables of arguments themselves."""
    if isinstance(value, dict):
        if not is_arguments:
            yield path, value
        is_object = not is_arguments and object_of(value) is not None
        for key, inner in value.items():
            yield from _tables_in(inner, (*path, key), is_arguments=is_object and key == "args")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _tables_in(inner, (*path, number), is_arguments=False)


def check_free_values(source: Source) -> Iterator[Diagnostic]:
    """Yield the values of free tables that cannot be passed to a call."""
    tables: list[tuple[KeyPath, TomlTable]] = [*argument_tables(source.raw)]
    for place, arguments in tables:
        yield from _names(source, arguments, place)
        for each in objects_in(arguments, place):
            yield from _names(source, each.args, (*each.path, "args"))
    options = table_at(source.raw, "snapshots", "options")
    for place, free in [*tables, (("snapshots", "options"), options)]:
        for path, value in _leaves(free, place):
            reason = not_passable(value)
            if reason is not None:
                message, remedy = reason
                yield source.problem(codes.NOT_PASSABLE, f"{dotted(path)} is {message}", path, remedy=remedy)


def _names(source: Source, arguments: TomlTable, path: KeyPath) -> Iterator[Diagnostic]:
    """Yield the keys that cannot be names of arguments."""
    for key in arguments:
        if not key.isidentifier() or keyword.iskeyword(key):
            message = f"{show(key)} cannot be the name of an argument"
            remedy = "an argument is a Python name: letters, digits and _"
            near = re.sub(r"\W+", "_", key)
            if near != key and near.isidentifier() and not keyword.iskeyword(near):
                remedy = f'did you mean "{near}"? {remedy[0].upper()}{remedy[1:]}'
            yield source.problem(codes.NOT_PASSABLE, message, (*path, key), at_key=True, remedy=remedy)


def not_passable(value: object) -> tuple[str, str] | None:
    """Return why a value cannot be passed to a call or kept in JSON without loss, and the remedy."""
    if isinstance(value, dt.date | dt.time):
        return "a date or time, which cannot be passed on", "write it as a text in quotes"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number", "leave it out, or have your own function turn a word into it"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a whole number beyond 64 bits", "write it as a text in quotes"
    return None


def check_secrets(source: Source) -> Iterator[Diagnostic]:
    """Yield a warning for each secret in the file, which is checked in and copied into every run folder."""
    written = source.written or source.raw  # values of variables do not stand in the file
    remedy = "take it out: credentials come from the machine's role or from the environment"
    for path, value in _leaves(table_at(written, "snapshots", "options"), ("snapshots", "options")):
        is_told = any(redaction.is_secret(str(part)) for part in path[2:])
        if isinstance(value, str) and is_told and _without_references(value):
            message = f"{dotted(path)} looks like a secret, and a job file is checked in"
            example = f'{remedy}, such as {path[-1]} = "${{env:NAME}}"'
            yield source.problem(codes.SECRET_IN_FILE, message, path, severity="warning", remedy=example)
    yield from _of_variables(source, written)
    uri = value_at(("snapshots", "uri"), written)
    if isinstance(uri, str) and redaction.password_in(_without_references(uri)):
        message = "snapshots.uri holds a password, and a job file is checked in"
        example = f'{remedy}, such as "://me:${{env:NAME}}@"'
        path = ("snapshots", "uri")
        yield source.problem(codes.SECRET_IN_FILE, message, path, severity="warning", remedy=example)


def _of_variables(source: Source, written: TomlTable) -> Iterator[Diagnostic]:
    """Yield secrets of [env] in the file, which is copied into every run folder, where no secret may be."""
    for name, content in table_at(written, "env").items():
        path: KeyPath = ("env", name, "value") if isinstance(content, dict) else ("env", name)
        value = value_at(path, written)
        if isinstance(value, str) and redaction.is_secret_variable(name, content) and "${" not in value:
            message = (
                f"env.{name} is a secret by its name" if path[2:] == () else f"env.{name} is declared secret"
            )
            remedy = f'write {name} = "${{env:{name}}}", and set that variable where the command runs'
            if path[2:] == ():
                remedy += f"; if it is none: {name} = {{ value = ..., secret = false }}"
            yield source.problem(
                codes.SECRET_RECORDED,
                f"{message}, and a run keeps a copy of its job file",
                path,
                remedy=remedy,
            )


def _without_references(text: str) -> str:
    return re.sub(r"\$\{[^{}]*\}", "", text)


def _leaves(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, number))
    else:
        yield path, value
