"""Memory: what a process may still take, within the limits of its control groups; and whom the kernel killed because it ran out."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from elasticflow.system.kernel_files import kernel_log, number_in, text_in

GROUPS = Path("/sys/fs/cgroup")
# Files of the limit, the use, and the part of the use that can be reclaimed: version 2, version 1.
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
# Version 1 has such a number where there is no limit.
_UNLIMITED = 1 << 62


class GroupMemory(NamedTuple):
    """Limit and free memory of a control group, in bytes; file caches count as free."""

    limit: int
    left: int


def available() -> int:
    """Return the bytes that this process may still take without swapping; `sys.maxsize` if unknown."""
    group = tightest_group()
    return min(of_machine(), sys.maxsize if group is None else group.left)


def of_machine() -> int:
    """Return the bytes that the machine can give without swapping; `sys.maxsize` if unknown."""
    import psutil

    try:
        return psutil.virtual_memory().available
    except OSError:
        return sys.maxsize


def tightest_group(root: Path = GROUPS) -> GroupMemory | None:
    """Return the control group of this process with the least free memory; None if no group has a limit."""
    return min(filter(None, map(_memory_of, memory_groups(root))), key=lambda group: group.left, default=None)


def memory_groups(root: Path = GROUPS) -> list[Path]:
    """Return the folders of the control groups below *root* that may limit this process's memory, the closest first."""
    folders = []
    for line in text_in(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "memory" if controllers else root
            inside = top / path.lstrip("/")
            folders += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(top)]
    # In a container it is the process's own group.
    return list(dict.fromkeys([*folders, root]))


def _memory_of(group: Path) -> GroupMemory | None:
    for limit_file, use_file, reclaimable in _FILES:
        limit, use = (number_in(group / name) for name in (limit_file, use_file))
        if limit is not None and use is not None and limit < _UNLIMITED:
            counts = dict(line.split() for line in text_in(group / "memory.stat").splitlines())
            caches = sum(int(counts.get(name, 0)) for name in reclaimable)
            return GroupMemory(limit, max(0, limit - use + caches))
    return None


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
    match = _COUNT.search(text_in(path))
    return None if match is None else int(match[1])


def is_in_log(pid: int, since_s: float = 0.0) -> bool:
    """Return whether the kernel's log says that it killed the process for memory; False where it may not be read.

    Args:
        since_s: Seconds after the machine's start; earlier lines are about another process with the same id.
    """
    report = f"Killed process {pid} (".encode()
    return any(report in line for line in kernel_log(since_s))
