"""Ranks that do not end although a peer has ended well: torch may deadlock in what runs at the end of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.system.processes import children_of, cpu_seconds_of, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.protocol.messages import StalledWorker

GRACE_S = 300.0
"""A rank may finish something that its peers do not take part in, such as an export: it shows signs of life."""
_LOOK_S = 1.0
# An observer that was paused for so long has seen nothing in between: a laptop that slept.
_PAUSE_S = 10.0
# Threads that only look whether there is something to do need less of a core than this share.
_IDLE_SHARE = 0.001
# State of a process, as the kernel names it.
_IN_KERNEL = "D"


class LingeringRanks:
    """Judges whether the ranks that are left on a node show signs of life: beats, output, CPU time, child processes.

    Args:
        ceiling_s: Longest time without progress that the job allows; at most `GRACE_S` counts here.
    """

    def __init__(self, ceiling_s: float) -> None:
        self._grace_s = min(GRACE_S, ceiling_s)
        self._looked = 0.0
        # By process id, the CPU time at the last sign of life, and when that was.
        self._signs: dict[int, tuple[float, float]] = {}

    def look(self, now: float, left: Mapping[int, float]) -> bool:
        """Return whether no rank that is left has shown a sign of life for the whole grace.

        Args:
            now: Monotonic time.
            left: Seconds since the last beat or output of each rank that is left, by process id.
        """
        if now < self._looked + _LOOK_S:
            return False
        if now > self._looked + _PAUSE_S or self._signs.keys() != left.keys():
            self._signs = {pid: (cpu_seconds_of(pid), now) for pid in left}
        self._looked = now
        for pid, (cpu_s, _) in self._signs.items():
            used_s = cpu_seconds_of(pid)
            is_reading = state_of(pid) == _IN_KERNEL  # or writing, to a disk or to another machine's
            if is_reading or used_s - cpu_s > _IDLE_SHARE * self._grace_s or children_of(pid):
                self._signs[pid] = (used_s, now)
        return bool(left) and all(
            min(silent_s, now - self._signs[pid][1]) >= self._grace_s for pid, silent_s in left.items()
        )


def waits_for_peers(worker: StalledWorker) -> bool:
    """Return whether the worker waits in a collective: its peers have ended too early, and it cannot end well."""
    functions = {frame.function for frame in worker.frames}
    return worker.waits_for_others and "destroy_process_group" not in functions
