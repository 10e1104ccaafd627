"""A worker that is ready before it is needed: `python -m elasticflow.launcher.fork_server.standby SERVER_PID FD`.

It imports what the last workers had imported, opens the accelerator, and waits on the socket FD until the fork server
hands it the rank of a worker. Until then it sees no data, counts as no one's failure, and ends with the server.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, NoReturn, Self

from elasticflow.launcher.fork_server import worker_process
from elasticflow.launcher.fork_server.preload import import_all, seed_imports, warm_up, warm_up_compiler
from elasticflow.launcher.fork_server.protocol import (
    MessageChannel,
    Prepare,
    Spawn,
    StandbyEnded,
    StandbyReady,
)
from elasticflow.launcher.fork_server.worker_process import end_with
from elasticflow.protocol.worker_environment import HEARTBEAT, HEARTBEAT_SLOT
from elasticflow.system.installation import module_command
from elasticflow.system.polling import readable
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from types import FrameType, TracebackType

    from elasticflow.launcher.fork_server.protocol import Message

# A third of a core: after each slice of CPU time comes a pause of twice its length.
_SLICE_S, _PAUSE_S = 0.02, 0.04
_SNAPSHOT = b"snapshot"


class LowPriority:
    """Within this context the process takes a third of a core, and none while a worker of the node copies a snapshot.

    A process that is nice cannot be made a usual one again without privileges, so it takes pauses instead.

    Args:
        connection: The pauses end once a message comes here: this process is needed.
        heartbeats: Descriptor of the heartbeats of the node's workers; None: no one trains.
        workers: Number of these workers.
    """

    def __init__(self, connection: socket.socket, heartbeats: int | None, workers: int) -> None:
        self._connection, self._workers = connection, workers
        size = HEARTBEAT_SLOT * workers
        self._memory = None if heartbeats is None else mmap.mmap(heartbeats, size, prot=mmap.PROT_READ)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGPROF, self._pause)
        signal.setitimer(signal.ITIMER_PROF, _SLICE_S, _SLICE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # One after the other: ignoring it drops a signal that is on its way, of which the process would die.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        while True:
            if readable([self._connection.fileno()], _PAUSE_S):
                self._end()
                return
            if not self._is_snapshot_copied():
                return

    def _is_snapshot_copied(self) -> bool:
        if self._memory is None:
            return False
        offsets = range(0, HEARTBEAT_SLOT * self._workers, HEARTBEAT_SLOT)
        return any(HEARTBEAT.unpack_from(self._memory, offset)[2].startswith(_SNAPSHOT) for offset in offsets)


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
            except OSError as error:  # no processes, memory or files are left; workers do without it
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


def main() -> None:
    """Prepare, wait, and become a worker, in a process that was started anew."""
    die_with_parent(int(sys.argv[1]))
    stand_by(socket.socket(fileno=int(sys.argv[2])))


def stand_by(connection: socket.socket) -> NoReturn:
    """Prepare as the first message on *connection* says, and become the worker that the next one asks for; never returns."""
    worker_process.set_apart()
    # A drain asked for before `worker.join` has its handler up must wait, not kill; join unblocks it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    channel = MessageChannel(connection)
    messages = _messages(channel)
    prepare = next(messages, None)
    if prepare is None:  # the server is gone
        os._exit(0)
    assert isinstance(prepare, Prepare)
    began = time.monotonic()
    sys.path[:0] = prepare.path
    with LowPriority(connection, prepare.heartbeats, prepare.workers):
        for _ in warm_up():
            pass
        seed_imports(prepare.seed)
        warm_up_compiler(has_gpu=prepare.has_gpu)
        import_all(prepare.preparation.modules, prepare.path)
        without_device = _open_device(prepare)
    seconds = round(time.monotonic() - began, 3)
    # The server does not listen any more if it needed the worker before that.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(StandbyReady(prepare.local_rank, os.getpid(), seconds, _memory(), without_device))
    request = next(messages, None)
    if request is None:  # the server is gone
        os._exit(0)
    assert isinstance(request, Spawn)
    connection.close()
    worker_process.take_over(request)
    end_with(lambda: worker_process.run_entry_point(prepare.entry_point))


def _messages(channel: MessageChannel) -> Iterator[Message]:
    """Yield the server's messages, until the server is gone."""
    while (messages := channel.read()) is not None:
        yield from messages


def _open_device(prepare: Prepare) -> str:
    """Open the worker's GPU, which takes the longest of all that can be done before; return why not, if so.

    The last workers must have trained on one: a job may train on the CPU of a machine that has GPUs.
    """
    _, variables, kind = prepare.preparation
    if kind in {"", "cpu"}:
        return ""
    device = importlib.import_module("elasticflow.runtime.process.standby_device")
    reason: str = device.open_device(kind, prepare.local_rank, prepare.workers, variables)
    return reason


def _memory() -> int:
    """Return the bytes of memory that this process alone holds."""
    import psutil

    memory = psutil.Process().memory_full_info()
    return int(getattr(memory, "uss", memory.rss))


if __name__ == "__main__":
    main()
