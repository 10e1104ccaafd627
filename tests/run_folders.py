"""Whether the lines in run folders are what the schema of events says."""

from __future__ import annotations

import json
import os
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator

from elasticflow import events
from elasticflow.cli.more.events_schema import events_schema
from elasticflow.events import SCHEMA_VERSION
from elasticflow.system.json_lines import lines_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from pathlib import Path

    import pytest

# Of a file of metrics or of a worker's log: one line is made as the other.
_MOST = 300
# Names and kinds of the records that are as the schema has them: to check a record takes twenty times as long as to tell its kind.
_right: set[tuple[str, Hashable]] = set()
# Folders in which no run folder lies, but many files.
_NOT_ENTERED = {".git", ".venv", "snapshots", "launches", "generations", "examples", "compiler-cache"}


@cache
def validators() -> dict[str, Draft202012Validator]:
    """Return what checks a line, by the name of its definition."""
    definitions = events_schema()["$defs"]

    def resolved(node: Any) -> Any:
        """Return *node* with what its references name in their place: looked up for each line, they take most of a check's time."""
        if isinstance(node, list):
            return [resolved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            [reference] = node.values()
            return resolved(definitions[reference.removeprefix("#/$defs/")])
        assert not node.get("minimum"), "the kind of a record tells a number's sign alone"
        return {key: resolved(each) for key, each in node.items()}

    return {name: Draft202012Validator(resolved(schema)) for name, schema in definitions.items()}


def violations_of_test(item: pytest.Item) -> list[str]:
    """Return what is wrong with the lines of the runs in a test's temporary folder; of a test without one, nothing."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    return [] if folder is None else violations(folder)


def violations(folder: Path) -> list[str]:
    """Return what is wrong with the lines in all run folders at or below *folder*.

    Lines that an earlier elasticflow wrote, and what a test itself has torn or written over, are left out: of a run whose
    last `run.started` tells no schema of ours nothing is looked at, nor lines that are no JSON.
    """
    wrong = []
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _NOT_ENTERED]
        if "events.jsonl" in files:
            run = type(folder)(path)
            wrong += [f"{run / file}: {problem}" for file, problem in violations_of_run(run)]
    return wrong


def violations_of_run(run: Path) -> Iterator[tuple[str, str]]:
    """Yield file and problem of each line of the run folder *run* that is not as the schema has it."""
    lines = list(_records(run / "events.jsonl"))
    starts = [n for n, record in enumerate(lines) if record.get("event") == events.RUN_STARTED]
    ours = [n for n in starts if lines[n].get("schema") == SCHEMA_VERSION]
    if not ours or ours[-1] != starts[-1]:
        return
    for record in lines[ours[0] :]:
        event = events.EVENTS.get(str(record.get("event")))
        if event is None or not event.is_kept:
            yield "events.jsonl", f"no event of events.jsonl: {record}"
        else:
            yield from _problems("events.jsonl", str(event), record)
    if len(ours) < len(starts):  # its older metrics and logs are another version's
        return
    for record in islice(_records(run / "metrics.jsonl"), _MOST):
        yield from _problems(
            "metrics.jsonl", "metrics.evaluation" if "eval" in record else "metrics.step", record
        )
    for log in sorted((run / "logs").glob("g*/rank*.jsonl")):
        for record in islice(_records(log), _MOST):
            name = _definition_of(record)
            yield from () if name is None else _problems(str(log.relative_to(run)), name, record)
    for file in sorted((run / "logged").glob("g*-rank*.jsonl")):
        for record in islice(_records(file), _MOST):
            yield from _problems(str(file.relative_to(run)), "logged.point", record)


def _definition_of(record: dict[str, Any]) -> str | None:
    """Return what a line of a worker's log has to be; None for lines of steps, which metrics.jsonl has too."""
    name = str(record.get("event"))
    if record.get("origin") != events.OURS:
        return "logs.line"
    if name in (events.STEP, events.EVALUATION):
        return None
    return name if name in events.EVENTS else "an event of no name"


def _problems(file: str, name: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if name not in validators():
        yield file, f"{name}: {record}"
        return
    if (kind := (name, _kind(record))) in _right:
        return
    errors = list(validators()[name].iter_errors(record))
    if not errors:
        _right.add(kind)
    for error in errors:
        yield file, f"{name}: {error.json_path}: {error.message}"


def _kind(value: Any) -> Hashable:
    """Return what the schema can tell *value* by: keys and types, of a number its sign, and any other value itself."""
    if isinstance(value, dict):
        return frozenset((key, _kind(each)) for key, each in value.items())
    if isinstance(value, list):
        return tuple(map(_kind, value))
    if type(value) in (int, float):
        return type(value), value >= 0, float(value).is_integer()
    return type(value), value


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in lines_of(path):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
