"""Requests to exit: signals, and a file in the run folder, which reaches all machines that share it."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from typing import TYPE_CHECKING, Literal

from elasticflow.system.processes import leave_signals

if TYPE_CHECKING:
    from pathlib import Path

# Signals within this time are one request: `timeout` signals a process and then its group, as a closed terminal does.
_ONE_REQUEST_S = 0.2
LEAVE: Literal["leave"] = "leave"
NOW: Literal["now"] = "now"
# Between two looks: the folder may be on a file system where each costs a message.
_LOOK_S = 0.5


class LeaveRequests:
    """Requests to exit that came as signals, from `listen` on.

    Attributes:
        first_at: When the first request came, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first_at: float | None = None

    def listen(self) -> dict[signal.Signals, signal._HANDLER]:
        """Take the signals from now on; return the previous handlers. Main thread only."""
        return {number: signal.signal(number, self._note) for number in leave_signals()}

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.first_at is None or now - self.first_at > _ONE_REQUEST_S:
            self.numbers.append(number)
        self.first_at = self.first_at or now


class Hurry:
    """Tells whether someone wants the launch, which has its verdict, to end at once: a further signal, or `elasticflow cancel --now`.

    Args:
        heeded: Signals that the launch has heeded before its verdict; a second one is always in a hurry.
    """

    def __init__(self, asked: LeaveRequests, cancel: CancelMark, heeded: int) -> None:
        self._asked, self._cancel = asked, cancel
        self._before = min(1, heeded)
        self._is_cancelled = False

    def __call__(self) -> bool:
        """Return whether to wait for nothing any more."""
        self._is_cancelled = self._is_cancelled or self._cancel.look(time.monotonic()) == NOW
        return self._is_cancelled or len(self._asked.numbers) > self._before


class CancelMark:
    """The file, which need not exist, as the supervisor sees it: each request in it is returned once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_look = -math.inf
        self._told: str | None = None

    def look(self, now: float) -> Literal["leave", "now"] | None:
        """Return a request that was not returned before; None if there is none, or if the monotonic *now* is too soon to look."""
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        asked: Literal["leave", "now"] | None = None
        # An unreadable file asks for nothing: the run continues.
        with contextlib.suppress(OSError):
            asked = NOW if self._path.read_bytes().strip() == NOW.encode() else LEAVE
        if asked is None or self._told in {asked, NOW}:
            return None
        self._told = asked
        return asked
