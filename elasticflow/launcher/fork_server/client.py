"""The agent's end of the fork server."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from elasticflow.launcher.fork_server.protocol import (
    Exited,
    Importing,
    MessageChannel,
    Prepare,
    Ready,
    Setup,
    Spawn,
    StandbyEnded,
    StandbyReady,
    Started,
    TorchrunOptions,
    TorchrunRefusedError,
)
from elasticflow.launcher.fork_server.server_process import HelperLostError, start_server
from elasticflow.system.polling import readable
from elasticflow.system.processes import StoppedChild, children_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.launcher.fork_server.protocol import Message
    from elasticflow.launcher.fork_server.server_process import ServerProcess
    from elasticflow.protocol.run_files import Preparation


class ForkServer:
    """The agent's end of the fork server.

    Args:
        started: Process of the server, which has no setup yet.

    Attributes:
        exits: Exit code (negative: signal) and Unix time of the end of each worker, by process id.
        importing: The module that it last began to import.
    """

    def __init__(self, started: ServerProcess, setup: Setup) -> None:
        self.process = started.process
        self._channel = MessageChannel(started.connection)
        self._setup = setup
        # A server that is gone already is noticed by `wait_ready`.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(setup)
        self._ready: Ready | None = None
        self._stopped = StoppedChild(started.process, time.monotonic())
        self.importing = "torch"
        self.exits: dict[int, tuple[int, float]] = {}
        self._started: dict[int, int] = {}
        self.standbys: dict[int, StandbyReady] = {}
        self.ended_standbys: list[StandbyEnded] = []

    @classmethod
    def start(cls, setup: Setup, keep_fds: tuple[int, ...] = ()) -> ForkServer:
        """Start a server for *setup*, as `start_server` does."""
        return cls(start_server(keep_fds, is_warm=setup.start_method != "spawn"), setup)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a worker exits."""
        return self._channel.connection.fileno()

    def pump(self, timeout: float = 0.0) -> bool:
        """Take in what the server reports, waiting at most *timeout* seconds for the first of it; end it if a signal has stopped it.

        Returns:
            False when the server is gone.
        """
        self._stopped.look(time.monotonic(), self._helpers)
        while readable([self.fileno()], timeout):
            messages = self._channel.read()
            if messages is None:
                return False
            for message in messages:
                self._take(message)
            timeout = 0.0
        return True

    def _helpers(self) -> list[int]:
        """Return the processes that do the server's work: the child that imports, then the process that serves."""
        return children_of(self.process.pid) if self._ready is None else [self._ready.pid]

    def _take(self, message: Message) -> None:
        match message:
            case Exited():
                self.exits[message.pid] = (message.code, message.at)
            case Started():
                self._started[message.local_rank] = message.pid
                # of a worker long gone that had the same id
                self.exits.pop(message.pid, None)
            case Importing():
                self.importing = message.module
            case Ready():
                self._ready = message
            case StandbyReady():
                self.standbys[message.local_rank] = message
            case StandbyEnded():
                self.standbys.pop(message.local_rank, None)
                self.ended_standbys.append(message)
            case Setup() | Spawn() | Prepare():
                raise AssertionError(f"{message} goes the other way")

    def wait_ready(self, tell: Callable[[str], None] = lambda _: None) -> Ready:
        """Return the server's `Ready`, once it has imported all that it may.

        Args:
            tell: Called with each module that it begins to import meanwhile.

        Raises:
            HelperLostError: the server has ended; its own message is in the agent's log.
        """
        told = None
        while self._ready is None:
            if told != self.importing:
                told = self.importing
                tell(told)
            if not self.pump(1.0):
                raise self.lost()
        return self._ready

    def options(self, tell: Callable[[str], None] = lambda _: None) -> TorchrunOptions:
        """Return the launch's arguments as torchrun parses them, once the server is ready.

        Raises:
            TorchrunRefusedError: torchrun refuses the arguments.
            HelperLostError: the server has ended.
        """
        ready = self.wait_ready(tell)
        if ready.options is None:
            raise TorchrunRefusedError(ready.refusal)
        return ready.options

    def spawn(self, local_rank: int, environment: Mapping[str, str], stdout: str, stderr: str) -> int:
        """Fork one worker and return its process id.

        Raises:
            HelperLostError: the server is gone.
        """
        self._started.pop(local_rank, None)
        self.standbys.pop(local_rank, None)
        self._send(Spawn(local_rank, dict(environment), stdout, stderr))
        while local_rank not in self._started:
            if not self.pump(1.0):
                raise self.lost()
        return self._started[local_rank]

    def prepare(
        self,
        local_rank: int,
        workers: int,
        preparation: Preparation,
        heartbeats: int | None,
    ) -> None:
        """Have the server start a standby, which the next `spawn` of *local_rank* takes; it has at most one.

        Args:
            preparation: The last workers' modules, variables and type of device.
            heartbeats: Descriptor of their heartbeats; None: no one trains.

        Raises:
            HelperLostError: the server is gone.
        """
        setup = self._setup
        self._send(
            Prepare(
                local_rank,
                workers,
                preparation,
                setup.path,
                setup.seed,
                setup.entry_point,
                heartbeats,
                self._ready is not None and self._ready.has_gpu,
            )
        )

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self.lost() from None

    def lost(self) -> HelperLostError:
        """Return the error that says how the server ended; waits until it has: its socket is closed."""
        return HelperLostError("fork server", self.process.wait())
