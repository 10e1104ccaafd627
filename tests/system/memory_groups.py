"""Memory cgroups, in which processes of a test run out of memory for real; for root."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A memory cgroup of either version, below that of this process.

    Attributes:
        prefix: Of a command that is to run in it.
    """

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
        self._is_first = "memory" in own
        root = _GROUPS / "memory" if self._is_first else _GROUPS
        self._path = root / own["memory" if self._is_first else ""].lstrip("/") / f"elasticflow-{os.getpid()}"
        self._path.mkdir()
        self.prefix = ("sh", "-c", f'echo $$ > {self._path}/cgroup.procs && exec "$@"', "sh")

    def leave_room(self, size_bytes: int) -> None:
        """Let its processes take *size_bytes* more than they have."""
        used, limit = (
            ("memory.usage_in_bytes", "memory.limit_in_bytes")
            if self._is_first
            else ("memory.current", "memory.max")
        )
        now = int((self._path / used).read_text())
        (self._path / limit).write_text(str(now + size_bytes))

    def remove(self) -> None:
        """Remove it; its processes have ended."""
        for _ in range(100):
            with suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Give a memory cgroup."""
    group = MemoryGroup()
    try:
        yield group
    finally:
        group.remove()
