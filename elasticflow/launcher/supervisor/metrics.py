"""metrics.jsonl: one line per step and evaluation, without gaps or repeats whatever was killed (floor 3)."""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING, Any

from elasticflow import events, logs
from elasticflow.launcher.supervisor.journal import AppendedLines

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.run_folder import RunFolder

_LEFT_OUT = frozenset({"timestamp", "level", "event", "job", "run_id", "node", "rank", "origin"})


class Metrics:
    """The metrics file of a run; lines come from rank 0's log."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lines = AppendedLines(folder.metrics)

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append the step and evaluation lines among a worker's log lines."""
        self._lines.append(
            [_metrics_of(r) for r in records if r["event"] in (events.STEP, events.EVALUATION)]
        )

    def settle(self, step: int) -> None:
        """Make the file end exactly with *step*, where a generation is about to go on.

        Lines beyond it are moved to metrics.redone.jsonl, then cut. Lines up to it that the supervisor
        did not live to write are taken from the rank logs of earlier generations.
        """
        size, lost = _after(self._folder.metrics, step)
        if lost:
            redone = AppendedLines(self._folder.metrics_redone)
            redone.append(lost)
            redone.sync()
            redone.close()
            self._lines.truncate(size)
        last = _last_step(self._folder.metrics)
        if last < step:
            self._lines.append(self._missing(last, step))
            self._lines.sync()

    def _missing(self, last: int, step: int) -> list[dict[str, Any]]:
        found: dict[tuple[int, bool], dict[str, Any]] = {}
        for generation in sorted(_generations(self._folder)):
            path = self._folder.rank_log(generation, 0)
            if path.exists():
                for record in _metrics_in(path):
                    if last < record["step"] <= step:
                        found[record["step"], "eval" in record] = record  # a newer generation's holds
        return [found[key] for key in sorted(found)]

    def close(self) -> None:
        """Close the file; its lines are on disk."""
        self._lines.sync()
        self._lines.close()


def _metrics_of(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _LEFT_OUT}


def _metrics_in(log: Path) -> list[dict[str, Any]]:
    records = []
    with log.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (b'"step"' in line or b'"evaluation"' in line):
                record = json.loads(line)
                if record.get("origin") == logs.OURS and record["event"] in (events.STEP, events.EVALUATION):
                    records.append(_metrics_of(record))
    return records


def _generations(folder: RunFolder) -> list[int]:
    logs = folder.path / "logs"
    return [int(p.name[1:]) for p in logs.glob("g*") if p.name[1:].isdecimal()] if logs.is_dir() else []


def _after(path: Path, step: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the size of the part up to *step* and the records beyond it; reads the tail only."""
    if path.stat().st_size == 0:
        return 0, []
    beyond: list[dict[str, Any]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while end > 0:
            start = data.rfind(b"\n", 0, end - 1) + 1
            record = json.loads(data[start:end])
            if record["step"] <= step:
                break
            beyond.append(record)
            end = start
    return end, beyond[::-1]


def _last_step(path: Path) -> int:
    """Return the step of the last step line; 0 if there is none."""
    if path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while end > 0:
            start = data.rfind(b"\n", 0, end - 1) + 1
            record = json.loads(data[start:end])
            if "eval" not in record:
                return int(record["step"])
            end = start
    return 0
