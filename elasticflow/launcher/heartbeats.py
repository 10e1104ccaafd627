"""Heartbeats of a node's workers: one slot each in memory shared with the agent (floor 3)."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from typing import Any

from elasticflow.environment import HEARTBEAT, HEARTBEAT_SLOT, HELD

MOST_WORKERS = 1024  # of one node; the bound of nodes.nproc_per_node


class Heartbeats:
    """The agent's side: which rank has not moved for too long.

    A beat is progress (a new step or phase), not a tick: a deadlocked rank has none.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        size = HEARTBEAT_SLOT * MOST_WORKERS
        if sys.platform == "linux":
            self.fd = os.memfd_create("elasticflow-heartbeats", 0)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.set_inheritable(self.fd, True)
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self._seen: list[tuple[int, float]] = []

    def reset(self, workers: int) -> None:
        """Start anew for the next generation of *workers* local ranks."""
        self._memory[:] = bytes(len(self._memory))
        self._seen = [(0, time.monotonic())] * workers

    def held(self) -> int | None:
        """Return the newest step whose state all local ranks hold in memory; None if one of them holds none."""
        offsets = (rank * HEARTBEAT_SLOT + HEARTBEAT.size for rank in range(len(self._seen)))
        return min((HELD.unpack_from(self._memory, offset)[0] for offset in offsets), default=0) or None

    def hung(self) -> dict[str, Any] | None:
        """Return the rank that has stood still longest if that is longer than the limit, else None."""
        now = time.monotonic()
        worst: dict[str, Any] | None = None
        for rank in range(len(self._seen)):
            beats, step, _, phase = HEARTBEAT.unpack_from(self._memory, rank * HEARTBEAT_SLOT)
            if beats != self._seen[rank][0]:
                self._seen[rank] = (beats, now)
            still = now - self._seen[rank][1]
            if still > self._timeout_s and (worst is None or still > worst["seconds"]):
                name = phase.rstrip(b"\0").decode("ascii", "replace") or "start"
                worst = {"local_rank": rank, "step": step, "phase": name, "seconds": round(still, 1)}
        return worst
