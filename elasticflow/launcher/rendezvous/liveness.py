"""Signs of life of a launch's supervisor, in a store that outlives it."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticflow.errors import INTERRUPTED
from elasticflow.launcher.rendezvous.store_keys import join_store
from elasticflow.protocol.store_address import StoreLostError

if TYPE_CHECKING:
    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.store_address import StoreAddress

_HEAD = "head"
_BEAT_S = 0.25
_SILENT_S = 3.0
_LONGEST_SILENCE_S = 20.0


class SupervisorWatch:
    """Whether the supervisor of the launch with *keys* gives signs of life; one with a store of its own gives none.

    Attributes:
        has_changed: It has given one since this was made.
    """

    def __init__(self, keys: ControlStore) -> None:
        self._keys = keys
        self._last: bytes | None = None
        self._since = self._looked = time.monotonic()
        self.has_changed = False

    def is_silent(self) -> bool:
        """Return whether it has been silent for too long; looks a few times a second."""
        now = time.monotonic()
        if now < self._looked + _BEAT_S:
            return False
        paused, self._looked = now - self._looked > _SILENT_S / 2, now
        if not self._keys.check([_HEAD]):
            return False
        beat = self._keys.get(_HEAD)
        if beat != self._last or paused:
            self.has_changed = self.has_changed or self._last not in (None, beat)
            self._last, self._since = beat, now
        return now - self._since > _SILENT_S


class SupervisorHeartbeat:
    """Signs of life of this supervisor in a store that somebody else serves; without the store this process ends."""

    _needs_store = True

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._is_over = threading.Event()
        self._answered = time.monotonic()
        for run in (self._beat, self._watch):
            threading.Thread(target=run, daemon=True, name="head").start()

    def end(self) -> None:
        """Give none any more."""
        self._is_over.set()

    def outlive_store(self) -> None:
        """Do not end this process any more if the store does not answer."""
        self._needs_store = False

    def _beat(self) -> None:
        with suppress(StoreLostError):  # seen by the supervisor, too
            keys = join_store(self._address, looks_at="")
            for number in itertools.count():
                keys.set(_HEAD, str(number))
                self._answered = time.monotonic()
                if self._is_over.wait(_BEAT_S):
                    return

    def _watch(self) -> None:
        """End this process if the store does not answer: the supervisor may be inside a request that never returns."""
        looked = time.monotonic()
        while not self._is_over.wait(_BEAT_S):
            before, looked = looked, time.monotonic()
            if looked - before > _LONGEST_SILENCE_S / 2:
                self._answered = looked  # this process was stopped for a while: no silence of the store's
            elif self._needs_store and looked - self._answered > _LONGEST_SILENCE_S:
                sys.stderr.write(f"the store at {self._address.endpoint} does not answer: this launch ends\n")
                sys.stderr.flush()
                os._exit(INTERRUPTED)
