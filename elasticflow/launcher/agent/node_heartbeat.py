"""A node's signs of life to the supervisor, its request to leave, and whether it was let go."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from elasticflow.launcher.fork_server.server_process import STORE_LOST
from elasticflow.launcher.rendezvous.liveness import Beat
from elasticflow.launcher.rendezvous.store_keys import beat_key, is_released, release_folder
from elasticflow.protocol import control_store
from elasticflow.protocol.messages import NodeLeaving

if TYPE_CHECKING:
    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.launcher.rendezvous.supervisor_channel import Outbox
    from elasticflow.protocol.control_store import ControlStore

_LONGEST_SILENCE_S = 10.0


class NodeReleasedError(Exception):
    """The supervisor has let this agent's node go, or counts it as lost: the agent exits, and has not failed."""


class NodeHeartbeat:
    """The heartbeat of the agent that posts to *outbox*; without the store this process ends."""

    def __init__(self, config: AgentConfig, outbox: Outbox) -> None:
        self._node, self._outbox = config.node, outbox
        self._is_leave_requested = self._has_asked = False
        self._is_released = False
        address = config.store_address
        self._beat = Beat(
            lambda: control_store.connect(address, release_folder(outbox.number)),
            beat_key(outbox.number),
            _LONGEST_SILENCE_S,
            # Other nodes have replaced a node that is cut off; its workers end with this process.
            when_silent=_end_without_store,
            when_failed=_end_without_store,
            after_each=self._look_for_release,
        )

    def begin(self) -> None:
        """Give signs of life from now on, and take SIGUSR1 as the request to leave. Main thread only."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._note_leave_request)
        self._beat.start()

    def end(self) -> None:
        """Give no signs of life any more: the launch is over, and its store may go at any time."""
        self._beat.stop()
        self._beat.join()

    def pass_on(self) -> None:
        """Tell the supervisor if this node was asked to leave.

        Raises:
            NodeReleasedError: this node was let go, or counts as lost: its workers have to end.
        """
        if self._is_leave_requested and not self._has_asked:
            self._has_asked = True
            self._outbox.post(NodeLeaving(self._node))
        if self._is_released:
            raise NodeReleasedError

    def _note_leave_request(self, number: int, frame: object) -> None:
        self._is_leave_requested = True

    def _look_for_release(self, store: ControlStore) -> None:
        if is_released(store, self._outbox.number):
            self._is_released = True
            self._beat.stop()


def _end_without_store() -> None:
    os._exit(STORE_LOST)
