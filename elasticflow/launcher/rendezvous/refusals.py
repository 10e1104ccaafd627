"""Connections that were refused: counted, and told now and then, however many strangers knock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

_PAUSE_S = 60.0


@dataclass(frozen=True)
class Refused:
    """Connections refused since this was told last.

    Attributes:
        connections: How many.
        address: Where the last one came from.
        reason: Why it was refused.
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
