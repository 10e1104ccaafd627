"""The keys of a run's job, each with the file or option that sets it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tomli

from elasticflow.compiler.launch_folder.materialize import source_copy
from elasticflow.system import records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from elasticflow.run_folder import RunFolder

DEFAULT = "default"


@dataclass(frozen=True)
class JobKey:
    """A key of the resolved job.

    Attributes:
        name: Key with its tables: `optimizer.args.lr`.
        value: Value in JSON.
        origin: The file that sets it, `--set`, or `DEFAULT`.
        overrides: True if a file that this origin extends sets the key, too.
    """

    name: str
    value: str
    origin: str
    overrides: bool = False


def keys_of(folder: RunFolder) -> list[JobKey]:
    """Return the keys of the newest launch's job; empty if its record cannot be read."""
    numbers = folder.launch_numbers()
    if not numbers:
        return []
    launch = folder.launch(numbers[-1])
    record = records.read(launch / "job.json")
    if not isinstance(record, dict) or not isinstance(record.get("job"), dict):
        return []
    layers = _layers(launch, record)
    return [
        JobKey(name, json.dumps(value, ensure_ascii=False), *_origin(name, layers))
        for name, value in _flat(record["job"])
    ]


def _layers(launch: Path, record: Mapping[str, Any]) -> list[tuple[str, set[str]]]:
    """Return the origins of keys, the strongest first, each with the keys it sets."""
    overrides = record.get("overrides")
    words = overrides if isinstance(overrides, list) else []
    layers = [("--set", {str(word).partition("=")[0].strip() for word in words})] if words else []
    files = record.get("files")
    for file in files if isinstance(files, list) else []:
        try:
            table = tomli.loads((launch / source_copy(str(file))).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        layers.append((str(file), {name for name, _ in _flat(table)}))
    return layers


def _origin(name: str, layers: list[tuple[str, set[str]]]) -> tuple[str, bool]:
    setters = [origin for origin, names in layers if _sets(name, names)]
    return (setters[0], len(setters) > 1) if setters else (DEFAULT, False)


def _sets(name: str, names: set[str]) -> bool:
    """Return True if one of *names* is this key, or a table above it that was set as a whole."""
    parts = name.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
