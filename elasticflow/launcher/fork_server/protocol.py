"""Messages between the agent and its fork server: JSON lines over a socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from elasticflow.protocol.child_processes import Program  # noqa: TC001
from elasticflow.protocol.json_codec import MessageCodec
from elasticflow.protocol.messages import RefusedModule  # noqa: TC001
from elasticflow.protocol.run_files import Preparation  # noqa: TC001  # the codec reads the fields' types

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True)
class TorchrunOptions:
    """The launch's arguments that an agent needs.

    Attributes:
        nproc: Workers of this node; `auto`, `gpu` and `cpu` are numbers by now.
        shown_stdouts: Local ranks whose standard output is shown beside being kept.
        shown_stderrs: Local ranks whose standard error is shown beside being kept.
        numa: How torch binds a worker to the cores near its GPU; empty if it does not.
    """

    nproc: int
    role: str = "default"
    shown_stdouts: tuple[int, ...] = ()
    shown_stderrs: tuple[int, ...] = ()
    numa: str = ""


class TorchrunRefusedError(RuntimeError):
    """torchrun does not take the launch's arguments; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"torchrun refuses the launch's arguments: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Setup:
    """To the server, once and first.

    Attributes:
        start_method: `fork` or `spawn`.
        seed: The job's seed, from which random numbers follow that its modules draw at import.
        arguments: torchrun's, for its own parser to read; none if the options are not wanted.
        script: Script that workers run instead of the entry point; None: the entry point.
        log: Absolute path of the file to which the server appends what it prints; empty: it continues as before.
    """

    entry_point: str
    path: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    start_method: str = "fork"
    seed: int = 0
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    log: str = ""
    script: Program | None = None


@dataclass(frozen=True)
class Spawn:
    """To the server: fork the worker of *local_rank*, its streams appended to files."""

    local_rank: int
    environment: dict[str, str]
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Prepare:
    """To the server, and on to a standby: get ready to become the worker of *local_rank*.

    Attributes:
        heartbeats: Descriptor of the heartbeats of the node's workers; None: no one trains.
        has_gpu: Torch can use an accelerator on this machine.
        preparation: The state of the last workers after their first step.
    """

    local_rank: int
    workers: int
    preparation: Preparation
    path: tuple[str, ...]
    seed: int
    entry_point: str
    heartbeats: int | None = None
    has_gpu: bool = False


@dataclass(frozen=True)
class StandbyReady:
    """From a standby, once: it took so many seconds to get ready, and holds so many bytes of memory of its own.

    Attributes:
        without_device: Why it has not opened the worker's GPU; empty if it has, or the worker will have none.
    """

    local_rank: int
    pid: int
    seconds: float
    memory: int
    without_device: str = ""


@dataclass(frozen=True)
class StandbyEnded:
    """From the server: a standby has ended before it was needed; a negative code is a signal."""

    local_rank: int
    code: int


@dataclass(frozen=True)
class Importing:
    """From the server, before `Ready`: it begins to import that module."""

    module: str


@dataclass(frozen=True)
class Ready:
    """From the server, once: it has imported all that it may.

    Attributes:
        refused: Modules that each worker has to import for itself.
        shares_imports: Workers have the job's modules from the start; else each imports them for itself.
        has_gpu: Torch can use an accelerator on this machine.
        options: The launch's arguments as torchrun parses them; None if they were not wanted, or torchrun refuses them.
        refusal: Why torchrun refuses them.
        pid: Id of the process that serves: the one that was started, or a child of it.
    """

    refused: tuple[RefusedModule, ...]
    shares_imports: bool = True
    has_gpu: bool = False
    options: TorchrunOptions | None = None
    refusal: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Started:
    """From the server: the worker that was asked for runs."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """From the server: a worker has ended, at a unix time; a negative code is a signal."""

    pid: int
    code: int
    at: float


Message = Setup | Spawn | Prepare | Importing | Ready | Started | Exited | StandbyReady | StandbyEnded
MESSAGES: MessageCodec[Message] = MessageCodec(*get_args(Message))


class MessageChannel:
    """Messages over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def send(self, message: Message) -> None:
        """Send one message."""
        self.connection.sendall(MESSAGES.encode(message).encode() + b"\n")

    def read(self) -> list[Message] | None:
        """Return the messages of one `recv`, or None at the end of the stream, also where the other side has ended with something unread."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [MESSAGES.decode(line) for line in whole]
