"""Reads files of a run while they are written: text is made printable, damaged lines are left out."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow.system import records
from elasticflow.system.json_lines import lines_from_end, lines_of
from elasticflow.system.records import BadJsonError, Damage, int_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

TAIL_BYTES = 1 << 18
# Lines of tens of thousands of steps: an epoch between two evaluations may be that long.
_SEARCHED_BYTES = 1 << 24


def parse(line: bytes | str) -> dict[str, Any] | None:
    """Return the line's JSON object with all text made printable; None if the line is torn or no object."""
    try:
        record = records.parse(line)
    except BadJsonError:
        return None
    data = line if isinstance(line, bytes) else line.encode("utf-8", "replace")
    # JSON has control characters behind a backslash, except DEL and those of Latin-1.
    may_act = b"\\" in data or b"\x7f" in data or not data.isascii()
    return records.printable_in(record) if may_act else record


def read(path: Path) -> Iterator[Record]:
    """Yield the whole records of *path* in order; none if the file does not exist or cannot be read (`damages_of`)."""
    return (record for line in lines_of(path) if (record := parse(line)) is not None)


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[Record]:
    """Return the records in the last *num_bytes* of *path*: enough for a summary of a file of any size."""
    return [record for line in _tail_lines(path, num_bytes) if (record := parse(line)) is not None]


def _tail_lines(path: Path, num_bytes: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            if size > num_bytes:
                file.readline()
            return file.readlines()
    except OSError:
        return []


def damages_of(folder: RunFolder) -> list[Damage]:
    """Return the parts of the run's state, events and metrics that cannot be read; views leave them out."""
    damages = []
    state = records.read(folder.state)
    if isinstance(state, Damage):
        damages.append(state)
    for path in (folder.events, folder.metrics):
        try:
            with path.open("rb"):
                pass
        except FileNotFoundError:
            continue
        except OSError as error:
            damages.append(records.damage_of(path, error))
            continue
        *lines, _ = [*_tail_lines(path, TAIL_BYTES), b""]  # an incomplete last line may still be in writing
        bad = sum(parse(line) is None for line in lines if line.endswith(b"\n"))
        if bad:
            damages.append(Damage(str(path), f"has {bad} damaged line{'s' * (bad > 1)} at its end"))
    return damages


def newest_with(path: Path, key: str) -> Iterator[Record]:
    """Yield the records of *path* that have *key*, the newest first, as far as they are in its last 16 MB.

    None if the file does not exist or cannot be read (`damages_of`).
    """
    mark, size = json.dumps(key).encode(), None
    with suppress(OSError):
        for end, line in lines_from_end(path):
            size = end if size is None else size
            if size - end > _SEARCHED_BYTES:
                return
            if mark in line and (record := parse(line)) is not None and record.get(key) is not None:
                yield record


def newest_evaluation(path: Path, last_step: float = math.inf) -> Record:
    """Return the newest evaluation in *path* up to *last_step*; empty if there is none in its last 16 MB.

    A script may evaluate on several sets after one step: the record has the metrics of all their lines.
    """
    found: Record = {}
    for line in newest_with(path, "eval"):
        if not isinstance(line["eval"], dict) or int_of(line, "step") > last_step:
            continue
        if found and line.get("step") != found.get("step"):
            break
        known = {key: value for key, value in found.items() if value is not None}
        found = {**line, **known, "eval": {**line["eval"], **known.get("eval", {})}}
    return found
