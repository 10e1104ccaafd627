"""Rank logs, followed line by line: the way of worker lines to the supervisor."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.agent.worker_warnings import WARNING_LEVELS, warning_in_log
from elasticflow.system.json_lines import FollowedLines
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.launcher.agent.worker_warnings import FoundWarning
    from elasticflow.run_folder import RunFolder

FOLLOWED = frozenset(event for event in events.EVENTS.values() if event.emitter == "worker")
_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_MARKS = tuple(f'"{name}"'.encode() for name in sorted(FOLLOWED | WARNING_LEVELS))


class RankLog:
    """One growing JSON-lines file."""

    def __init__(self, folder: RunFolder, generation: int, rank: int) -> None:
        self._file = FollowedLines(folder.rank_log(generation, rank))
        self._warnings: list[FoundWarning] = []

    def lines(self) -> list[EventRecord]:
        """Return the followed records among the lines completed since the last call."""
        followed = []
        for line in self._file.lines():
            record = _record(line)
            if record is None:
                continue
            if record.get("origin") != events.OURS:
                self._warnings += [found] if (found := warning_in_log(record)) is not None else []
            elif record.get("event") in FOLLOWED:
                followed.append(record)
        return followed

    def warnings(self) -> list[FoundWarning]:
        """Return the warnings of the job's code and its libraries among the lines that `lines` has returned; each once."""
        found, self._warnings = self._warnings, []
        return found

    def close(self) -> None:
        """Stop following."""
        self._file.close()


def _record(line: bytes) -> EventRecord | None:
    if not any(mark in line for mark in _MARKS):
        return None
    try:
        return parse(line)
    except BadJsonError:  # not ours: user code may write anything into its own log
        return None


def tail(path: Path, size: int = 16384) -> str:
    """Return the last *size* bytes of a worker's standard error; empty if the worker died before it opened that.

    A worker that died before it could log leaves nothing else. Lines come without the `[rank0]: ` that torch puts before those
    of an exception in a process that has a process group (torch 2.13, `distributed_c10d._distributed_excepthook`).
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return _PREFIX.sub("", file.read().decode("utf-8", "replace"))
    except FileNotFoundError:
        return ""
