"""Ranks that do not end although a peer has ended well: torch may deadlock while its process ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.system.processes import (
    IN_KERNEL,
    children_of,
    cpu_seconds_of,
    io_bytes_of,
    state_of,
    waits_for_lock,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.protocol.messages import StalledWorker

GRACE_S = 300.0
"""Seconds without a sign of life; a rank that does work of its own, such as an export, shows some."""
_LOOK_S = 1.0
# An observer that was paused for so long has seen nothing in between: a laptop that slept.
_PAUSE_S = 10.0
# Threads that only poll use a smaller share of a core than this, and read fewer bytes in a second.
_IDLE_SHARE, _IDLE_BYTES_PER_S = 0.001, 16


class _Work(NamedTuple):
    """CPU time and bytes of input and output that a process had used at the monotonic time *at*."""

    cpu_s: float
    io_bytes: int
    at: float

    @classmethod
    def of(cls, pid: int, now: float) -> _Work:
        return cls(cpu_seconds_of(pid), io_bytes_of(pid), now)


class LingeringRanks:
    """Judges whether the ranks that are left on a node show signs of life: beats, output, CPU time, I/O, child processes.

    Args:
        ceiling_s: Longest time without progress that the job allows; at most `GRACE_S` counts here.
    """

    def __init__(self, ceiling_s: float) -> None:
        self._grace_s = min(GRACE_S, ceiling_s)
        self._looked = 0.0
        # By process id, as of the last sign of life.
        self._signs: dict[int, _Work] = {}

    def look(self, now: float, left: Mapping[int, float]) -> bool:
        """Return whether no rank that is left has shown a sign of life for the whole grace.

        Args:
            now: Monotonic time.
            left: Seconds since the last beat or output of each rank that is left, by process id.
        """
        if now < self._looked + _LOOK_S:
            return False
        if now > self._looked + _PAUSE_S or self._signs.keys() != left.keys():
            self._signs = {pid: _Work.of(pid, now) for pid in left}
        self._looked = now
        for pid, before in self._signs.items():
            work = _Work.of(pid, now)
            has_worked = (
                work.cpu_s - before.cpu_s > _IDLE_SHARE * self._grace_s
                or work.io_bytes - before.io_bytes > _IDLE_BYTES_PER_S * self._grace_s
            )
            is_reading = state_of(pid) == IN_KERNEL  # or writing, to a disk or to another machine's
            if has_worked or is_reading or children_of(pid):
                self._signs[pid] = work
        return bool(left) and all(
            min(silent_s, now - self._signs[pid].at) >= self._grace_s for pid, silent_s in left.items()
        )

    def begin_again(self) -> None:
        """Give the ranks that are left another grace: one of them is at work without a sign of life."""
        self._signs = {}


def waits_for_peers(worker: StalledWorker) -> bool:
    """Return whether the worker waits in a collective: its peers have ended too early, and it cannot end well."""
    return worker.waits_for_others and not _is_leaving(worker)


def sleeps(worker: StalledWorker, pid: int) -> bool:
    """Return whether the job's own code in the process *pid* waits for a time or for input: both come, but a lock may not."""
    return bool(worker.frames) and not _is_leaving(worker) and not waits_for_lock(pid)


def _is_leaving(worker: StalledWorker) -> bool:
    return "destroy_process_group" in {frame.function for frame in worker.frames}
