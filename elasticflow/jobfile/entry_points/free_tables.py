"""Checks values of the free tables (`args`, `options`), which no pydantic model checks."""

from __future__ import annotations

import datetime as dt
import keyword
import math
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.entry_points.object_arguments import argument_tables, objects_in
from elasticflow.jobfile.text.layers import table_at, value_at
from elasticflow.system import redaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source


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
    """Return a text without its references."""
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
