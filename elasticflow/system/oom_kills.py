"""Processes that the kernel killed because memory ran out: its count, and its log."""

from __future__ import annotations

import re
from pathlib import Path

from elasticflow.system.free_memory import memory_groups
from elasticflow.system.kernel_files import kernel_log

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Kills for memory since this object was made: in this process' control group, or on the machine if it has none."""

    def __init__(self) -> None:
        self._file = next((path for path in _counters() if _count(path) is not None), None)
        self._before = self._now()

    def includes(self, pid: int) -> bool:
        """Return whether the process that ended as *pid*, or a child of it, was killed for memory.

        Where this process may not read the kernel's log, any kill counted meanwhile is taken for such a kill.
        """
        return self._now() > self._before or is_in_log(pid)

    def _now(self) -> int:
        return 0 if self._file is None else _count(self._file) or 0


def counts_of_kills() -> dict[str, int]:
    """Return the kernel's counts of processes killed for memory, by file, the group of this process first."""
    counts = {str(path): _count(path) for path in _counters()}
    return {file: count for file, count in counts.items() if count is not None}


def _counters() -> list[Path]:
    """Return the files in which the kernel may count, the closest first: of control groups, of the whole machine."""
    files = ("memory.events", "memory.oom_control")  # version 2, version 1
    return [*(group / file for group in memory_groups() for file in files), Path("/proc/vmstat")]


def _count(path: Path) -> int | None:
    try:
        match = _COUNT.search(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if match is None else int(match[1])


def is_in_log(pid: int, since_s: float = 0.0) -> bool:
    """Return whether the kernel's log says that it killed the process for memory; False where it may not be read.

    Args:
        since_s: Seconds after the machine's start; earlier lines are about another process with the same id.
    """
    report = f"Killed process {pid} (".encode()
    return any(report in line for line in kernel_log(since_s))
