"""Rank logs, followed line by line: the way of worker lines to the supervisor."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from elasticflow import events, logs

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.run_folder import RunFolder

FOLLOWED = frozenset(event for event in events.EVENTS.values() if event.emitter == "worker")
_MARKS = tuple(f'"{name}"'.encode() for name in sorted(FOLLOWED))


_NEWLINE = re.compile(rb"\n")


class GrowingFile:
    """A file of lines that grows, and that may not be there yet.

    Args:
        path: Where it is, or will be.
        ends: What ends a line.
        longest: Bytes of a line; what is longer comes in pieces. None: lines come whole.
    """

    def __init__(self, path: Path, ends: re.Pattern[bytes] = _NEWLINE, longest: int | None = None) -> None:
        self._path, self._ends, self._longest = path, ends, longest
        self._fd: int | None = None
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the lines completed since the last call, without their ends."""
        if self._fd is None:
            if not self._path.exists():
                return []
            self._fd = os.open(self._path, os.O_RDONLY)
        data = self._rest
        while chunk := os.read(self._fd, 1 << 20):
            data += chunk
        *whole, self._rest = self._ends.split(data)
        if self._longest is not None and len(self._rest) > self._longest:
            whole.append(self._rest)
            self._rest = b""
        return whole

    def close(self) -> bytes:
        """Stop following; return what stood behind the last line."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        rest, self._rest = self._rest, b""
        return rest


class RankLog:
    """One growing JSON-lines file."""

    def __init__(self, folder: RunFolder, generation: int, rank: int) -> None:
        self._file = GrowingFile(folder.rank_log(generation, rank))

    def lines(self) -> list[dict[str, Any]]:
        """Return the followed records among the lines completed since the last call."""
        return [record for line in self._file.lines() if (record := _followed(line)) is not None]

    def close(self) -> None:
        """Stop following."""
        self._file.close()


def _followed(line: bytes) -> dict[str, Any] | None:
    if not any(mark in line for mark in _MARKS):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # not ours: user code may write anything into its own log
        return None
    is_ours = isinstance(record, dict) and record.get("origin") == logs.OURS
    return record if is_ours and record.get("event") in FOLLOWED else None


def tail(path: Path, size: int = 8192) -> str:
    """Return the end of a worker's standard error: all there is of one that died before it could log.

    Nothing if it died even before it had opened that.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
