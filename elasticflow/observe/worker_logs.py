"""The logs of a run's workers as one stream: JSON lines merged by time, then printed lines."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from elasticflow import events
from elasticflow.errors import LogsNotFoundError
from elasticflow.observe.records import parse
from elasticflow.system.json_lines import FollowedLines
from elasticflow.system.records import damage_of, printable, unix_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

Stream = Literal["jsonl", "stdout", "stderr"]
LEVELS = ("debug", "info", "warning", "error", "critical")
POLL_S = 0.2
_MEASURED = frozenset({events.STEP, events.EVALUATION})
_FOLDER = re.compile(r"g(?P<generation>\d{4,})")
_FILE = re.compile(r"rank(?P<rank>\d+)\.(?P<stream>jsonl|stdout|stderr)")
_STREAMS: dict[str, Stream] = {stream: stream for stream in get_args(Stream)}


@dataclass(frozen=True)
class LogLine:
    """A line of a worker's log.

    Attributes:
        stream: The worker's file that has the line.
        text: Text of the line, without the newline.
        record: The line's JSON object, for `jsonl`.
    """

    generation: int
    rank: int
    stream: Stream
    text: str
    record: Record | None = None

    @property
    def time(self) -> float:
        """Unix time at which the line was written; 0 if unknown."""
        return (unix_time(self.record.get("timestamp")) if self.record else None) or 0.0

    @property
    def is_measured(self) -> bool:
        """True for elasticflow's own lines about a step or an evaluation, which metrics.jsonl has, too."""
        record = self.record or {}
        return record.get("origin") == events.OURS and record.get("event") in _MEASURED

    def is_at_least(self, level: str) -> bool:
        """Return True if the line is of *level* or above; printed lines count as info, standard error always counts."""
        if self.stream == "stderr":
            return True
        said = "info" if self.record is None else str(self.record.get("level", "info"))
        return said not in LEVELS or LEVELS.index(said) >= LEVELS.index(level)


def generations(folder: RunFolder) -> list[int]:
    """Return the generations that left logs, ascending."""
    logs = folder.path / "logs"
    if not logs.is_dir():
        return []
    return sorted(int(m["generation"]) for p in logs.iterdir() if (m := _FOLDER.fullmatch(p.name)))


def read_logs(folder: RunFolder, generation: int | None = None, rank: int | None = None) -> Iterator[LogLine]:
    """Yield the lines of a generation, by default the newest, of every rank or of one rank.

    Raises:
        LogsNotFoundError: there are no such logs.
    """
    there = generations(folder)
    if generation is None and not there:
        raise LogsNotFoundError(f"run {folder.run_id} has no logs yet")
    number = there[-1] if generation is None else generation
    if number not in there:
        known = ", ".join(map(str, there)) or "none"
        raise LogsNotFoundError(
            f"run {folder.run_id} has no logs of generation {number}", f"there are logs of: {known}"
        )
    files = _files(folder, number, rank)
    if not files and rank is None:
        raise LogsNotFoundError(f"generation {number} of run {folder.run_id} has no logs yet")
    if not files:
        ranks = ", ".join(map(str, sorted({r for r, _, _ in _files(folder, number, None)}))) or "none"
        raise LogsNotFoundError(
            f"generation {number} of run {folder.run_id} has no logs of rank {rank}",
            f"there are logs of: {ranks}",
        )
    return _merged(number, files)


def follow(
    folder: RunFolder,
    generation: int | None,
    rank: int | None,
    *,
    is_live: Callable[[], bool],
    pause: Callable[[float], None],
    is_shown: Callable[[LogLine], bool] = lambda _: True,
    backlog: int | None = None,
) -> Iterator[LogLine]:
    """Yield lines as they are written, and continue with newer generations unless *generation* is given.

    Ends when *is_live* is no longer true and every written line has been read.

    Args:
        generation: The only generation to follow; None: all from the newest on.
        rank: The only rank to follow; None: all.
        is_live: Returns True while more lines may be written.
        backlog: Most lines to yield of those written before; None: all.
    """
    followers: dict[Path, tuple[int, int, Stream, FollowedLines]] = {}
    while True:
        alive = is_live()
        there = [g for g in generations(folder)[-2:] if generation is None] or [generation or 0]
        # `read_logs` shows the generations before the newest one at the start.
        first = min((entry[0] for entry in followers.values()), default=there[-1])
        for number in there:
            for of_rank, stream, path in _files(folder, number, rank) if number >= first else []:
                followers.setdefault(path, (number, of_rank, stream, FollowedLines(path)))
        new = [
            _line(number, of_rank, stream, line)
            for number, of_rank, stream, follower in followers.values()
            for line in [*follower.look(), *([] if alive else follower.unended())]
        ]
        new.sort(key=lambda line: (line.generation, line.stream != "jsonl", line.time))
        shown = [line for line in new if is_shown(line)]
        yield from shown if backlog is None else shown[max(0, len(shown) - backlog) :]
        backlog = None
        if not alive:
            return
        pause(POLL_S)


def _files(folder: RunFolder, generation: int, rank: int | None) -> list[tuple[int, Stream, Path]]:
    logs = folder.generation_logs(generation)
    if not logs.is_dir():
        return []
    files: list[tuple[int, Stream, Path]] = []
    for path in logs.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and rank in {None, int(match["rank"])}:
            stream = _STREAMS[match["stream"]]
            files.append((int(match["rank"]), stream, path))
    return sorted(files, key=lambda entry: (list(_STREAMS).index(entry[1]), entry[0]))


def _merged(generation: int, files: list[tuple[int, Stream, Path]]) -> Iterator[LogLine]:
    logs = [_lines(generation, *file) for file in files if file[1] == "jsonl"]
    yield from heapq.merge(*logs, key=lambda line: line.time)
    for file in files:
        if file[1] != "jsonl":
            yield from _lines(generation, *file)


def _lines(generation: int, rank: int, stream: Stream, path: Path) -> Iterator[LogLine]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield _line(generation, rank, stream, line)
    except OSError as error:
        yield _line(generation, rank, stream, f"({damage_of(path, error)})".encode())


def _line(generation: int, rank: int, stream: Stream, line: bytes) -> LogLine:
    # A progress bar is drawn over itself: its last state stays on a terminal.
    text = printable(line.rstrip(b"\r\n").rpartition(b"\r")[2].decode("utf-8", "replace"))
    return LogLine(generation, rank, stream, text, parse(line) if stream == "jsonl" else None)
