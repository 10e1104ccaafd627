"""A store's trouble as reports, not too many of them."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

from elasticflow import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.storage.storage import Trouble

_EVERY_S = 10.0


class ThrottledTroubles:
    """Takes what `Storage` tells of operations that are tried again; from any thread.

    Args:
        tell: Given the first, and then at most one every ten seconds.
        clock: What time it is.
    """

    def __init__(
        self, tell: Callable[[dict[str, Any]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._told_at = -math.inf

    def __call__(self, trouble: Trouble) -> None:
        """Tell of it, unless one was told of a moment ago."""
        with self._lock:
            now = self._clock()
            if now - self._told_at < _EVERY_S:
                return
            self._told_at = now
        self._tell(
            {
                "event": events.STORE_TROUBLE,
                "operation": trouble.operation,
                "class": trouble.kind,
                "error": trouble.error,
                "attempt": trouble.attempt,
                "pause_s": round(trouble.pause_s, 1),
            }
        )
