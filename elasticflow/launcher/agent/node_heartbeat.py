"""A node's presence: it tells that it lives, asks to leave, and hears that it is gone."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from elasticflow.launcher.fork_server.helpers import STORE_LOST
from elasticflow.launcher.rendezvous.store_keys import beat_key, is_gone, join_store
from elasticflow.protocol.store_address import StoreAddress

if TYPE_CHECKING:
    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.launcher.rendezvous.rounds import Outbox

_BEAT_S = 0.25
_LONGEST_SILENCE_S = 10.0


class NodeReleasedError(Exception):
    """The supervisor has let this agent's node go, or takes it for lost: the agent leaves, and has not failed."""


class NodeHeartbeat:
    """The presence of the agent that posts to *feed*."""

    def __init__(self, config: AgentConfig, feed: Outbox) -> None:
        self._config, self._feed = config, feed
        self._wants_to_leave = self._has_asked = False
        self._is_gone = False
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answered = 0.0

    def begin(self) -> None:
        """Tell from now on that this node lives, and listen for SIGUSR1, the wish to leave. Main thread only."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._note_wish)
        self._answered = time.monotonic()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Tell it no more: the launch is over, and its store may go at any time."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_BEAT_S)  # one inside a request when the interpreter ends would abort it

    def look(self) -> None:
        """Pass on a wish to leave.

        Raises:
            NodeReleasedError: this node was let go, or is taken for lost: its workers have to end.
        """
        if self._wants_to_leave and not self._has_asked:
            self._has_asked = True
            self._feed.post({"type": "leaving", "node": self._config.node})
        if self._is_gone:
            raise NodeReleasedError

    def _note_wish(self, number: int, frame: object) -> None:
        self._wants_to_leave = True

    def _beat(self) -> None:
        """Change a number in the store until the node is gone; without the store this process ends.

        A thread of its own with a connection of its own: the agent's main thread may be busy ending workers.
        """
        try:
            store = join_store(StoreAddress.parse(self._config.rendezvous))
            for number in itertools.count():
                store.set(beat_key(self._feed.number), str(number))
                self._is_gone = is_gone(store, self._feed.number)
                self._answered = time.monotonic()
                if self._is_gone or self._is_over.wait(_BEAT_S):
                    return
        except RuntimeError:
            self._store_is_lost()

    def _watch(self) -> None:
        """End this process if the store does not answer: a node that is cut off has been replaced by others."""
        looked = time.monotonic()
        while not (self._is_gone or self._is_over.wait(_BEAT_S)):
            before, looked = looked, time.monotonic()
            if looked - before > _LONGEST_SILENCE_S / 2:
                self._answered = looked  # this process was stopped for a while: no silence of the store's
            elif looked - self._answered > _LONGEST_SILENCE_S:
                self._store_is_lost()  # a request to a host that is cut off never returns

    def _store_is_lost(self) -> None:
        if not self._is_over.is_set():
            os._exit(STORE_LOST)  # the workers end with it
