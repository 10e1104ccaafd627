"""A store's trouble as reports, not too many of them."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.storage.storage import Trouble

_EVERY_S = 10.0


class ThrottledTroubles:
    """Passes on what `Storage` reports of operations that are tried again; used from any thread.

    Args:
        report: Called with the first, and then with at most one every ten seconds.
        clock: What time it is.
    """

    def __init__(
        self, report: Callable[[Trouble], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._reported_at = -math.inf

    def __call__(self, trouble: Trouble) -> None:
        """Report *trouble*, unless one was reported a moment ago."""
        with self._lock:
            now = self._clock()
            if now - self._reported_at < _EVERY_S:
                return
            self._reported_at = now
        self._report(trouble)
