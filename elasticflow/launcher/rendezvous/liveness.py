"""Signs of life through a control store: a `Beat` gives them, a `Silence` tells how long there has been none."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from elasticflow.launcher.rendezvous.store_keys import SUPERVISOR_BEAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.protocol.control_store import ControlStore, RemoteControlStore

BEAT_S = 0.25
_SILENT_S = 3.0


class Silence:
    """The time for which a process or a store has given no sign of life, seen by an observer that looks again and again.

    A pause of the observer, on a laptop that slept for instance, is no silence: counting begins anew after it.

    Args:
        now: On the monotonic clock, as in all methods.

    Attributes:
        has_changed: The sign of life has changed since the first one was seen.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._sign: object = None
        self._since = self._looked = now
        self.has_changed = False

    def look(self, sign: object, now: float) -> None:
        """Take in *sign*, a value that changes with each sign of life; None before the first."""
        was_paused = now - self._looked > self._limit_s / 2
        self._looked = now
        if sign != self._sign or was_paused:
            self.has_changed = self.has_changed or self._sign not in (None, sign)
            self._sign, self._since = sign, now

    def is_too_long(self, now: float) -> bool:
        """Return whether there has been no sign of life for longer than the limit."""
        return now - self._since > self._limit_s


class Beat:
    """Changes a number in a control store several times a second, and watches whether the store answers.

    It has threads and a connection of its own: the main thread may be busy ending workers, or be inside a request to a
    host that is cut off, which never returns. A connection that is cut is made again, unless *when_failed* ends the process.

    Args:
        join: Returns a client of the store.
        key: Key of the number.
        limit_s: Seconds without an answer after which the store counts as lost; a server that may be away has more.
        after_each: Called with the store after each change.
    """

    def __init__(
        self,
        join: Callable[[], RemoteControlStore],
        key: str,
        limit_s: float,
        *,
        when_silent: Callable[[], None],
        when_failed: Callable[[], None] = lambda: None,
        after_each: Callable[[RemoteControlStore], None] = lambda _: None,
    ) -> None:
        self._join, self._key, self._limit_s = join, key, limit_s
        self._when_silent, self._when_failed, self._after_each = when_silent, when_failed, after_each
        self._is_over = threading.Event()
        self._needs_store = True
        self._answers = 0
        self._patience_s = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin."""
        self._threads = [
            threading.Thread(target=run, daemon=True, name="beat") for run in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Give no sign of life any more, and ignore what becomes of the store."""
        self._is_over.set()

    def join(self) -> None:
        """Wait a moment for the threads to end: a thread inside a request would abort the interpreter when it ends."""
        for thread in self._threads:
            thread.join(BEAT_S)

    def outlive_store(self) -> None:
        """Continue, but ignore a store that does not answer."""
        self._needs_store = False

    def _beat(self) -> None:
        numbers = itertools.count()
        while not self._is_over.is_set():
            try:
                self._beat_through(self._join(), numbers)
            except RuntimeError:
                if not self._is_over.is_set():
                    self._when_failed()
                    # Only this connection may have been cut: a process that works must not seem dead.
                    self._is_over.wait(BEAT_S)

    def _beat_through(self, store: RemoteControlStore, numbers: Iterator[int]) -> None:
        self._patience_s = store.patience_s
        while not self._is_over.is_set():
            store.set(self._key, str(next(numbers)))
            self._after_each(store)
            self._answers += 1
            self._is_over.wait(BEAT_S)

    def _watch(self) -> None:
        silence = Silence(self._limit_s, time.monotonic())
        while not self._is_over.wait(BEAT_S):
            now = time.monotonic()
            silence.look(self._answers, now)
            if self._needs_store and silence.is_too_long(now - self._patience_s):
                self._when_silent()


class SupervisorWatch:
    """Looks for signs of life of the launch's supervisor in *store*, which another process serves.

    A supervisor that has given none yet is silent, too: it may have died right after it claimed the launch.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._looked = time.monotonic()
        self._silence = Silence(_SILENT_S, self._looked)

    @property
    def has_changed(self) -> bool:
        """True if a sign of life was seen since this object was made."""
        return self._silence.has_changed

    def look(self) -> bool:
        """Look, a few times a second at most; return whether the supervisor has been silent for too long."""
        now = time.monotonic()
        if now < self._looked + BEAT_S:
            return False
        self._looked = now
        sign = self._store.get(SUPERVISOR_BEAT) if self._store.check([SUPERVISOR_BEAT]) else None
        self._silence.look(sign, now)
        return self._silence.is_too_long(now)
