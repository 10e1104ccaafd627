"""Ends a child process that a signal has stopped: it would never answer, and nothing else tells that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.system.processes import STOPPED, state_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

# Nobody has to guess about a process that a signal has stopped: it does nothing until another signal comes.
STOPPED_S = 10.0
_LOOK_S = 1.0
# If this process was paused for so long, its child may have been stopped and woken up with it.
_PAUSE_S = 5.0


class StoppedChild:
    """Watches *child* of this process.

    Args:
        now: On the monotonic clock.
    """

    def __init__(self, child: subprocess.Popen[bytes], now: float) -> None:
        self._child, self._looked = child, now
        self._since: float | None = None

    def look(self, now: float, helpers: Callable[[], Iterable[int]] = tuple) -> None:
        """Kill the child if it, or one of the *helpers* that do its work, was stopped `STOPPED_S` ago; looks once a second."""
        if now < self._looked + _LOOK_S:
            return
        was_paused, self._looked = now > self._looked + _PAUSE_S, now
        if was_paused or not any(state_of(pid) == STOPPED for pid in (self._child.pid, *helpers())):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now >= self._since + STOPPED_S:
            self._child.kill()
