"""What the supervisor writes about a run: events.jsonl and state.json (floor 3)."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from elasticflow import events

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.run_folder import RunFolder

_STATE_EVERY_S = 0.25
_LEVELS = {
    events.WORKER_FAILED: "error",
    events.RUN_FAILED: "error",
    events.BUDGET_SPENT: "error",
    events.SNAPSHOT_FAILED: "warning",
    events.SNAPSHOT_REJECTED: "warning",
    events.STORE_TROUBLE: "warning",
    events.HANG_DETECTED: "warning",
    events.NODE_LOST: "warning",
    events.NODE_EXCLUDED: "warning",
    events.NODE_AWAITED: "warning",
    events.PRELOAD_REFUSED: "warning",
    events.ENTRY_POINT_EDITED: "warning",
    events.LOSS_SKIPPED: "warning",
    events.STATE_LEFT_OUT: "warning",
    events.KIND_CHANGED: "warning",
}


def now() -> str:
    """Return the time in UTC, RFC 3339 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class AppendedLines:
    """A file of JSON lines with one writer; each call is one `write`, so no reader sees half a batch of one line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._mend()

    def _mend(self) -> None:
        """Cut off a last line torn by a crash."""
        size = os.fstat(self._fd).st_size
        at = size
        while at > 0:
            start = max(0, at - 65536)
            found = os.pread(self._fd, at - start, start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at != size:
            os.ftruncate(self._fd, at)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append *records*, one line each."""
        if records:
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            while data:
                data = data[os.write(self._fd, data) :]

    def sync(self) -> None:
        """Return when the lines are on disk."""
        os.fsync(self._fd)

    def truncate(self, size: int) -> None:
        """Keep the first *size* bytes."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _carried_over(folder: RunFolder) -> dict[str, Any]:
    """Return what is the run's and not the launch's, as the launch before left it."""
    begin = {"restarts": 0, "step": 0, "steps": None, "epoch": 0, "loss": None, "snapshot": None}
    try:
        before = json.loads(folder.state.read_text(encoding="utf-8"))
        return {key: before[key] for key in begin}
    except (OSError, ValueError, KeyError):  # the first launch, or a state that says nothing
        return begin


class Journal:
    """Events and state of one run; the supervisor is the only writer."""

    def __init__(self, folder: RunFolder, launch: int, show: Callable[[dict[str, Any]], None]) -> None:
        self._folder = folder
        self._lines = AppendedLines(folder.events)
        self._show = show
        self._written = 0.0
        self.generation = 0
        self.state: dict[str, Any] = {
            "status": "running",
            "job": folder.job,
            "run_id": folder.run_id,
            "launch": launch,
            "generation": 0,
            **_carried_over(folder),
            "held": None,
            "workers": [],
            "verdict": None,
            "pid": os.getpid(),
            "started": now(),
            "updated": now(),
        }

    def event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """Append one event of the supervisor's own and show it."""
        record = {
            "timestamp": now(),
            "level": _LEVELS.get(name, "info"),
            "event": name,
            "job": self._folder.job,
            "run_id": self._folder.run_id,
            "generation": self.generation,
            **fields,
        }
        self.copy(record)
        return record

    def copy(self, record: dict[str, Any]) -> None:
        """Append an event as it stands, a worker's for instance, and show it."""
        self._lines.append([record])
        self._show(record)

    def show(self, record: dict[str, Any]) -> None:
        """Show a record that belongs to another file."""
        self._show(record)

    def update(self, *, at_once: bool = False, **fields: Any) -> None:
        """Change the state; written now, or with the next write at most a quarter of a second later."""
        self.state.update(fields)
        if at_once or time.monotonic() - self._written >= _STATE_EVERY_S:
            self.write_state()

    def write_state(self) -> None:
        """Replace state.json; a reader sees the old or the new one, never a part."""
        self._written = time.monotonic()
        self.state["updated"] = now()
        partial = self._folder.state.with_suffix(".json.tmp")
        partial.write_text(json.dumps(self.state) + "\n", encoding="utf-8")
        partial.replace(self._folder.state)

    def close(self) -> None:
        """Write the last state and close."""
        self.write_state()
        self._lines.sync()
        self._lines.close()
