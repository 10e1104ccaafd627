"""Connections to the process that serves a launch's keys: how many it may have, and those that it has refused."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan

PER_NODE = 7
"""Connections that a node holds: three of its command, four of its agent. Each worker has one while it begins."""
_OWN = 100
# Bound for a node whose job has one for each GPU or core.
_WORKERS = 8
_MOST = 1 << 16
# Seconds between two reports of refused connections.
_PAUSE_S = 60.0


def allow_many() -> None:
    """Let this process have as many files open as the system allows it, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def needed(nodes: int, workers_per_node: int) -> int:
    """Return the number of open files that the server of the keys of so many *nodes* may need."""
    return _OWN + (PER_NODE + workers_per_node) * nodes


def exhausted() -> str:
    """Return why no more connections are accepted, and what helps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have no more than {soft:,} files open; raise `ulimit -n` where the launch is started"


def warning(plan: LaunchPlan) -> str | None:
    """Return what to say where this process is to serve more nodes than it may have connections; None if it may."""
    if plan.is_store_outside or plan.nodes_max == 1:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    workers = plan.nproc_per_node if isinstance(plan.nproc_per_node, int) else _WORKERS
    wanted = needed(plan.nodes_max, workers)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return None
    return (
        f"{plan.nodes_max:,} nodes take {wanted:,} connections to this process, which may have {hard:,} files open: "
        f"nodes beyond that cannot join; raise `ulimit -Hn` to {wanted}"
    )


@dataclass(frozen=True)
class Refused:
    """Connections refused since this was told last.

    Attributes:
        address: Source of the last refused connection.
    """

    connections: int
    address: str
    reason: str

    def __str__(self) -> str:
        """Return a sentence."""
        count = "a connection" if self.connections == 1 else f"{self.connections} connections, the last"
        return f"refused {count} from {self.address}: {self.reason}"


class Refusals:
    """Counts refused connections; may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._address, self._reason = 0, "", ""
        self._told_at: float | None = None

    def note(self, address: str, reason: str) -> None:
        """Count one more."""
        with self._lock:
            self._count += 1
            self._address, self._reason = address, reason

    def take(self) -> Refused | None:
        """Return what is to be told; None if nothing is, or was within the last minute."""
        if not self._count:  # looked at all the time
            return None
        with self._lock:
            now = time.monotonic()
            if self._told_at is not None and now < self._told_at + _PAUSE_S:
                return None
            refused = Refused(self._count, self._address, self._reason)
            self._count, self._told_at = 0, now
            return refused
