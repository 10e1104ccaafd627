"""Signals that ask a command to leave: how many requests they are, and since when."""

from __future__ import annotations

import signal
import time

from elasticflow.system.processes import leave_signals

# Signals within this time are one request: `timeout` signals a process and then its group, as a closed terminal does.
_ONE_REQUEST_S = 0.2


class LeaveRequests:
    """Requests to leave that came as signals, from `listen` on.

    Attributes:
        numbers: The signal of each request.
        first_at: When the first request came, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first_at: float | None = None

    def listen(self) -> dict[signal.Signals, signal._HANDLER]:
        """Take the signals from now on; return who had them before. Main thread only."""
        return {number: signal.signal(number, self._note) for number in leave_signals()}

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.first_at is None or now - self.first_at > _ONE_REQUEST_S:
            self.numbers.append(number)
        self.first_at = self.first_at or now
