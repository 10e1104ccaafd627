"""The fork server's standbys: at most one for each local rank."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING

from elasticflow.launcher.fork_server.protocol import MessageChannel, StandbyEnded, StandbyReady
from elasticflow.launcher.fork_server.standby import stand_by
from elasticflow.launcher.fork_server.worker_process import end_with
from elasticflow.system.installation import module_command
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Container

    from elasticflow.launcher.fork_server.protocol import Prepare, Spawn


class Standbys:
    """Processes that wait to become workers; they are children of this process, which has to reap them.

    Args:
        start_method: `fork`, or `spawn`: they are started anew.
        agent: The server's connection to the agent, which they must not hold open.
    """

    def __init__(self, start_method: str, agent: socket.socket) -> None:
        self._start_method, self._agent = start_method, agent
        self._pids: dict[int, int] = {}
        self._channels: dict[int, MessageChannel] = {}

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a standby reports."""
        return [channel.connection.fileno() for channel in self._channels.values()]

    def start(self, prepare: Prepare) -> StandbyEnded | None:
        """Start the standby of a local rank, unless it has one; return a report if the system has no room for it."""
        if prepare.local_rank in self._pids.values():
            return None
        # Asked for before: a child may run first when its parent is dead.
        server = os.getpid()
        with contextlib.ExitStack() as on_error:
            try:
                ours, theirs = (on_error.enter_context(end) for end in socket.socketpair())
                pid = os.fork()
            except OSError as error:  # no processes, memory or files are left; workers go on without it
                sys.stderr.write(f"no standby of local rank {prepare.local_rank}: {error}\n")
                return StandbyEnded(prepare.local_rank, 1)
            if pid == 0:
                end_with(lambda: self._become_standby(server, theirs))
            on_error.pop_all()
        theirs.close()
        self._pids[pid] = prepare.local_rank
        self._channels[pid] = MessageChannel(ours)
        self._send(pid, prepare)
        return None

    def _become_standby(self, server: int, connection: socket.socket) -> None:
        die_with_parent(server)
        self._agent.close()
        self.disown()
        if self._start_method == "fork":
            stand_by(connection)
        connection.set_inheritable(True)
        arguments = str(server), str(connection.fileno())
        command = module_command("elasticflow.launcher.fork_server.standby", *arguments, options=("-u",))
        os.execv(sys.executable, command)  # noqa: S606

    def call(self, request: Spawn) -> int | None:
        """Have a standby become the worker that *request* asks for; return its process id, or None if there is none."""
        for pid in list(self._channels):
            if self._pids[pid] == request.local_rank and self._send(pid, request):
                del self._pids[pid]
                self._close(pid)
                return pid
        return None

    def read(self, ready: Container[int]) -> list[StandbyReady]:
        """Return the standbys' reports from the descriptors that are *ready*."""
        reports: list[StandbyReady] = []
        for pid, channel in list(self._channels.items()):
            if channel.connection.fileno() in ready:
                messages = channel.read()
                if messages is None:  # it has ended, and will be reaped
                    self._close(pid)
                reports += [message for message in messages or () if isinstance(message, StandbyReady)]
        return reports

    def ended(self, pid: int, code: int) -> StandbyEnded | None:
        """Take note that a child has ended; return the report of it if it was a standby."""
        local_rank = self._pids.pop(pid, None)
        self._close(pid)
        return None if local_rank is None else StandbyEnded(local_rank, code)

    def disown(self) -> None:
        """Close, in a child of the server, the server's connections to its standbys."""
        for channel in self._channels.values():
            channel.connection.close()

    def _send(self, pid: int, message: Prepare | Spawn) -> bool:
        """Send *message*; False if the standby has ended."""
        try:
            self._channels[pid].send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._close(pid)
            return False
        return True

    def _close(self, pid: int) -> None:
        channel = self._channels.pop(pid, None)
        if channel is not None:
            channel.connection.close()
