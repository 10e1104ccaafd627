"""JSON-lines files read while somebody writes them (floor 4)."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TAIL_BYTES = 1 << 18


def parse(line: bytes | str) -> dict[str, Any] | None:
    """Return the line's JSON object, or None when it is something else or torn."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of *path*, in order; none if it does not exist."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (record := parse(line)) is not None:
                yield record


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the records in the last *num_bytes* of *path*: enough for a summary of a file of any size."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        size = file.seek(0, 2)
        file.seek(max(0, size - num_bytes))
        if size > num_bytes:
            file.readline()
        return [record for line in file if (record := parse(line)) is not None]


class Follower:
    """A growing file, read on from where the last look ended.

    Only whole lines are returned; one without its newline waits for it. A file that shrank is read from its
    new end: what was cut off has been seen.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the lines completed since the last call, without their newlines."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._at:
                    self._at, self._rest = size, b""
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole

    def last(self) -> list[bytes]:
        """Return the line that never got its newline, for use when nobody writes any more."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def last_of(records: list[dict[str, Any]], key: str, count: int = 1) -> list[dict[str, Any]]:
    """Return the last *count* records that have *key*, oldest first."""
    return list(deque((r for r in records if r.get(key) is not None), maxlen=count))
