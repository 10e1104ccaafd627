"""metrics.jsonl: one line per step and evaluation, without gaps or repeats whatever was killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.protocol.run_files import place_of
from elasticflow.system.json_lines import AppendedLines, append_lines, lines_from_end, lines_of
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.run_folder import RunFolder

_LEFT_OUT = frozenset({"timestamp", "level", "event", "job", "run_id", "node", "rank", "origin"})


class Metrics:
    """The metrics file of a run; lines come from rank 0's log.

    Args:
        require_held: Called before each change; raises where another launch may have the run (`launcher/journal/run_lock.py`).

    Attributes:
        damage: Damaged lines moved out of the file when it was opened; None if it was whole.
        missing_of: Generations that have trained steps without a line here: rank 0's log lies in another machine's run folder.
    """

    def __init__(self, folder: RunFolder, require_held: Callable[[], None] = lambda: None) -> None:
        self._folder, self._require_held = folder, require_held
        self._lines = AppendedLines(folder.metrics, _is_metrics)
        self.damage = self._lines.damage
        self._damaged_at = self._lines.damaged_at
        # The newest generation that has continued, and after which step.
        self._generation = self._began_after = 0
        self.missing_of: dict[int, tuple[int, int]] = {}

    def add(self, records: list[EventRecord]) -> None:
        """Append the step and evaluation lines among a worker's log lines.

        A node that was cut off, and counts as lost, may tell of its steps when others have long done them again.
        """
        self._require_held()
        lines = [_metrics_of(r) for r in records if r["event"] in (events.STEP, events.EVALUATION)]
        late = [line for line in lines if line.get("generation", self._generation) < self._generation]
        self._lines.append([line for line in lines if line not in late])
        if late:
            redone = [line for line in late if line["step"] > self._began_after]
            append_lines(self._folder.metrics_redone, redone)
            self._put_in([line for line in late if line["step"] <= self._began_after])

    def last_step(self) -> int:
        """Return the last step that the file has; 0 if it has none."""
        return _last_step(self._folder.metrics)

    def settle(self, step: int, generation: int = 0) -> float:
        """Make the file end exactly with *step*, where *generation* is about to continue; return the seconds that cost.

        Lines beyond it are moved to metrics.redone.jsonl. Lines up to it that the supervisor did not live to write, or
        that were damaged, are taken from the rank logs of earlier generations.
        """
        self._require_held()
        before = self._generation or generation - 1
        self._generation, self._began_after = generation, step
        size, lost = _after(self._folder.metrics, step)
        seconds = _seconds_of(lost)
        if lost or size < self._folder.metrics.stat().st_size:
            append_lines(self._folder.metrics_redone, lost)
            self._lines.truncate(size)
        last = _last_step(self._folder.metrics, self._damaged_at)
        if self._damaged_at is not None:  # damage may have taken a line of that step, too
            last, self._damaged_at = last - 1, None
        if last < step:
            found = self._missing(last, step)
            self._put_in(found)
            if not found:
                self.missing_of[before] = last, step
        return seconds

    def complete(self) -> None:
        """Take in the lines of `missing_of` whose rank logs are in the run folder by now."""
        self._require_held()
        for last, step in self.missing_of.values():
            self._put_in(self._missing(last, step))

    def _put_in(self, lines: list[EventRecord]) -> None:
        """Append the lines of committed steps that are missing from metrics.jsonl."""
        if not lines:
            return
        size, later = _after(self._folder.metrics, min(line["step"] for line in lines) - 1)
        there = {place_of(line): line for line in later}
        new = {place_of(line): line for line in lines if place_of(line) not in there}
        if new:
            all_lines = new | there
            self._lines.truncate(size)
            self._lines.append([all_lines[key] for key in sorted(all_lines)])
            self._lines.sync()

    def _missing(self, last: int, step: int) -> list[EventRecord]:
        """Return the lines of the steps after *last*, up to *step*, from the rank logs of all generations."""
        lines: dict[tuple[Any, ...], EventRecord] = {}
        names = [path.name[1:] for path in (self._folder.path / "logs").glob("g*")]
        for generation in sorted(int(name) for name in names if name.isdecimal()):
            for record in _metrics_in(self._folder.rank_log(generation, 0)):
                if last < record["step"] <= step:
                    lines[place_of(record)] = record  # that of a newer generation holds
        return [lines[key] for key in sorted(lines)]

    def close(self) -> None:
        """Close the file; its lines are on disk."""
        self._lines.sync()
        self._lines.close()


def _metrics_of(record: EventRecord) -> EventRecord:
    return {key: value for key, value in record.items() if key not in _LEFT_OUT}


def _record(line: bytes) -> EventRecord | None:
    """Return the record on *line*; None if it is damaged."""
    try:
        record = parse(line)
    except BadJsonError:
        return None
    return record if _is_metrics(record) else None


def _is_metrics(record: EventRecord) -> bool:
    return type(record.get("step")) is int


def _metrics_in(log: Path) -> list[EventRecord]:
    """Return the metrics lines of a rank's log; none if there is no log that can be read."""
    metrics = []
    for line in lines_of(log):
        if line.endswith(b"\n") and (b'"step"' in line or b'"evaluation"' in line):
            record = _record(line) or {}
            is_ours = record.get("origin") == events.OURS
            if is_ours and record.get("event") in (events.STEP, events.EVALUATION):
                metrics.append(_metrics_of(record))
    return metrics


def _after(path: Path, step: int) -> tuple[int, list[EventRecord]]:
    """Return the size of the part up to *step* and the records beyond it."""
    beyond: list[EventRecord] = []
    for end, line in lines_from_end(path):
        record = _record(line)
        if record is not None and record["step"] <= step:
            return end, beyond[::-1]
        if record is not None:
            beyond.append(record)
    return 0, beyond[::-1]


def _seconds_of(lines: list[EventRecord]) -> float:
    """Return how long the steps on these lines have taken, by their own clocks: not all need have a line."""
    total = 0.0
    before: EventRecord | None = None
    for line in lines:
        time, seconds = line.get("time"), line.get("seconds")
        is_new = before is None or before.get("generation") != line.get("generation")
        if is_new and isinstance(seconds, int | float):
            total += seconds
        elif not is_new and isinstance(time, int | float):
            total += max(0.0, time - before["time"])  # type: ignore[index]
        before = line if isinstance(time, int | float) else None
    return total


def _last_step(path: Path, before: int | None = None) -> int:
    """Return the step of the last step line, of those that end at byte *before* at most; 0 if there is none."""
    ends = lines_from_end(path)
    records = (_record(line) for end, line in ends if before is None or end <= before)
    return next((int(record["step"]) for record in records if record is not None and "eval" not in record), 0)
