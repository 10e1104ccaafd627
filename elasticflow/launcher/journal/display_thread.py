"""Shows a running launch to people, in a thread of its own.

A write to a terminal that is held, a pipe that no one reads, or a dead connection may wait for ever. A record that cannot be
shown is named on standard error, and those after it are shown.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.events import EventRecord

# Records; further ones are not shown, but all are in the run's files.
_MOST_WAITING = 100_000
_PATIENCE_S = 5.0
_LOOK_S = 0.05
_TICK_S = 0.25
_NOT_SHOWN = (
    "elasticflow: something that happened cannot be shown here; the run goes on, and its events have it:"
)


class DisplayThread:
    """Has *show* called with each record, in order, without waiting for it; and *tick* four times a second."""

    def __init__(self, show: Callable[[EventRecord], None], tick: Callable[[], None] | None = None) -> None:
        self._show, self._tick = show, tick
        self._ticked, self._is_sound = 0.0, True
        self._waiting: SimpleQueue[EventRecord | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="show")
        self._thread.start()

    def __call__(self, record: EventRecord) -> None:
        """Have *record* shown, and return at once."""
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(record)

    def close(self) -> bool:
        """Show what waits and end; return False if the thread hangs: nothing was shown for a while."""
        self._waiting.put(None)
        left, since = self._waiting.qsize(), time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if self._waiting.qsize() != left:
                left, since = self._waiting.qsize(), time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                return False
        return True

    def _run(self) -> None:
        while True:
            try:
                record = self._waiting.get(timeout=None if self._tick is None else _TICK_S)
            except Empty:
                pass
            else:
                if record is None:
                    return
                self._attempt(partial(self._show, record))
            if self._tick is not None and time.monotonic() >= self._ticked + _TICK_S:
                self._attempt(self._tick)
                self._ticked = time.monotonic()

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001  # whatever it is, it is told
            if self._is_sound:
                self._is_sound = False
                with suppress(OSError, ValueError):  # it is closed
                    sys.stderr.write(f"{_NOT_SHOWN}\n{traceback.format_exc()}")
