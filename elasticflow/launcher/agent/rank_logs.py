"""Logs and standard errors of workers, followed line by line: events for the supervisor, and warnings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow import events
from elasticflow.system.json_lines import FollowedLines
from elasticflow.system.records import BadJsonError, parse, printable, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.events import EventRecord
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

WARNING_LEVELS = frozenset({"warning", "error", "critical"})
FOLLOWED = frozenset(event for event in events.EVENTS.values() if event.emitter == "worker")
_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_MARKS = tuple(f'"{name}"'.encode() for name in sorted(FOLLOWED | WARNING_LEVELS))
_LONGEST = 300  # characters
# Bytes of a line that are looked at: the time that `_OF_TORCH` takes grows with their square, and no other thread runs meanwhile.
_LOOKED_AT = 2000
_MOST_WAITING = 1 << 16
# As `warnings.formatwarning` writes it; the source line below it is indented.
_OF_PYTHON = re.compile(
    r"(?P<file>\S.*?):(?P<line>\d+): (?P<category>[\w.]*Warning): (?P<text>.*)", re.DOTALL
)
# `[rank0]:[W1126 18:17:23.123456789 socket.cpp:767] text`, and torch's own loggers without the brackets.
_OF_TORCH = re.compile(r"(?:\[rank\d+\]:)?\s*\[?W\d* [^\]]*?(?P<place>[\w./+-]+\.\w+:\d+)\] (?P<text>.*)")
# As `logging.basicConfig` writes it.
_OF_LOGGING = re.compile(r"WARNING:(?P<name>[\w.]+):(?P<text>.*)")
# They say nothing about training: torch asks for the name of an address that may have none.
_NOISE = ("The hostname of the client socket cannot be retrieved",)


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


class FoundWarning(NamedTuple):
    """A warning.

    Attributes:
        category: Python's class of it; `torch` for torch's own lines; `WARNING name` for a logger.
        place: File and line; empty if unknown.
    """

    category: str
    place: str
    text: str


def warning_in_log(record: Record) -> FoundWarning | None:
    """Return the warning in a line of a worker's log that is no event; None if it is below that level."""
    level = str(record.get("level"))
    if level not in WARNING_LEVELS:
        return None
    message, logger = str(record.get("event")), text_of(record, "logger") or ""
    of_python = _OF_PYTHON.fullmatch(message) if logger == "py.warnings" else None
    if of_python is not None:
        return _of_python(of_python, _without_source(of_python["text"]))
    place = text_of(record, "place") or ""
    file, _, line = place.rpartition(":")
    at = f"{_short(file)}:{line}" if file else ""
    return FoundWarning(f"{level.upper()} {logger}".rstrip(), at, _in_one_line(message))


class WarningLines:
    """Tells warnings on a standard error from its other lines."""

    def __init__(self) -> None:
        self._source_follows = False

    def take(self, lines: Iterable[bytes]) -> tuple[list[FoundWarning], list[bytes]]:
        """Return the warnings among the next *lines*, and the lines that are none."""
        found, others = [], []
        for line in lines:
            text = line[:_LOOKED_AT].decode("utf-8", "replace")
            if self._source_follows and text.startswith("  "):
                self._source_follows = False
                continue
            of_python = _OF_PYTHON.fullmatch(text.rstrip("\r"))
            self._source_follows = of_python is not None
            if of_python is not None:
                found.append(_of_python(of_python, of_python["text"]))
            elif (of_torch := _OF_TORCH.fullmatch(text)) is not None:
                if not any(noise in text for noise in _NOISE):
                    at = printable(of_torch["place"])
                    found.append(FoundWarning("torch", at, _in_one_line(of_torch["text"])))
            elif (of_logging := _OF_LOGGING.fullmatch(text)) is not None:
                category = f"WARNING {of_logging['name']}"
                found.append(FoundWarning(category, "", _in_one_line(of_logging["text"])))
            else:
                others.append(line)
        return found, others


class StderrWarnings:
    """The warnings on one worker's standard error, as it grows."""

    def __init__(self, path: Path) -> None:
        self._file, self._lines = FollowedLines(path, longest=_MOST_WAITING), WarningLines()

    def take(self) -> list[FoundWarning]:
        """Return the warnings since the last call."""
        return self._lines.take(self._file.lines())[0]

    def close(self) -> None:
        """Stop following."""
        self._file.close()


def _of_python(match: re.Match[str], text: str) -> FoundWarning:
    place = f"{_short(match['file'])}:{match['line']}"
    return FoundWarning(match["category"], place, _in_one_line(text))


def _without_source(text: str) -> str:
    """Return a warning's text without the source line that Python writes below it."""
    *lines, last = text.rstrip("\n").split("\n")
    return "\n".join(lines) if lines and last.startswith("  ") else text


def _short(file: str) -> str:
    """Return a file from its package if it is installed, or from this process' folder, the project's, if it is below that."""
    _, is_installed, rest = file.rpartition("site-packages/")
    if is_installed:
        return printable(rest)
    path = Path(file)
    return printable(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _in_one_line(text: str) -> str:
    words = printable(" ".join(text.split()))
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
