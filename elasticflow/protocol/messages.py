"""What the processes of a launch tell one another through its control store: one frozen dataclass for each message.

Agents, and machines that joined, send a `Message` to the supervisor, which answers with an `Order`. Each is one JSON
object whose `type` says which it is; `message_to_json` and `message_from_json`, `order_to_json` and `order_from_json`
are the only places that know that form. Whoever takes messages in matches on their types, with `assert_never` at the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from elasticflow.events import EventRecord

GenerationRequest = Literal["drain", "stop", "stacks"]
"""What a supervisor asks of a generation: leave after a step, be killed now, tell where its workers stand."""


class RefusedModule(NamedTuple):
    """A module of the job that each worker has to import for itself, and why."""

    module: str
    reason: str


class Frame(NamedTuple):
    """A line of Python that is being run."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class LoaderStack(NamedTuple):
    """The stack of a worker's loader process, innermost frame first."""

    pid: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class StartedWorker:
    """A worker that runs; `state.json` lists them in this form."""

    rank: int
    pid: int
    node: str


@dataclass(frozen=True)
class StalledWorker:
    """A worker that makes no progress.

    Attributes:
        node: The node it runs on.
        rank: Its rank.
        phase: What it last said that it does.
        step: Steps it has finished.
        seconds: How long it has made no progress.
        limit_s: How long it may make none in that phase.
        state: Its process' state as the kernel has it: R, S, D, T; empty where the kernel does not tell.
        frames: Its main thread's stack, innermost frame first; empty if it did not answer.
        loaders: The stacks of its loader processes, where it waits for them.
        log: File that holds all of its stacks.
    """

    node: str
    rank: int
    phase: str
    step: int
    seconds: float
    limit_s: float
    state: str
    frames: tuple[Frame, ...]
    loaders: tuple[LoaderStack, ...]
    log: str


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: As `Popen.returncode` gives it: negative is a signal.
        at: Unix time of its end.
        ended_by_us: The agent killed it, after another worker's failure for instance; such an end is no failure.
        oom_killed: It failed, and the kernel killed it, or a child of it, because memory ran out.
        stderr: The end of its standard error, if it failed.
    """

    rank: int
    pid: int
    exit_code: int
    at: float
    ended_by_us: bool
    oom_killed: bool
    stderr: str


@dataclass(frozen=True)
class NodeReady:
    """A node's agent is ready to start workers: everything is imported.

    Attributes:
        node: Id of the node inside the launch.
        host: Name of its machine.
        nproc: Workers that it starts.
        node_rank: Its place among all nodes, where the rendezvous is static; else None.
        refused: Modules that its fork server could not import beforehand.
    """

    node: str
    host: str
    nproc: int
    node_rank: int | None = None
    refused: tuple[RefusedModule, ...] = ()


@dataclass(frozen=True)
class NodeLeaving:
    """A node is about to be taken away; its workers are to leave after a step."""

    node: str


@dataclass(frozen=True)
class AgentDied:
    """The agent of a machine that joined has ended, says that machine, for the reason *error*."""

    node: str
    error: str


@dataclass(frozen=True)
class WorkersStarted:
    """The workers of a generation run on one node."""

    generation: int
    node: str
    workers: tuple[StartedWorker, ...]


@dataclass(frozen=True)
class LogLines:
    """Lines of the workers' logs that the supervisor follows, in the order they were written.

    Attributes:
        lines: The lines.
        held: Newest step whose state all workers of the node hold in memory; None if one of them holds none.
    """

    lines: tuple[EventRecord, ...]
    held: int | None


@dataclass(frozen=True)
class WriterReports:
    """What a node's snapshot writer reports: events without the fields that all events have."""

    reports: tuple[EventRecord, ...]


@dataclass(frozen=True)
class ProcessLeftBehind:
    """A process that outlived the worker which started it was ended.

    Attributes:
        node: The node it ran on.
        pid: Its process id.
        command: Its command line, cut short.
        was_killed: It did not end when it was asked to.
    """

    node: str
    pid: int
    command: str
    was_killed: bool


@dataclass(frozen=True)
class Standstill:
    """All workers of a node have made no progress for too long (*is_so*), or one makes progress again."""

    generation: int
    node: str
    is_so: bool


@dataclass(frozen=True)
class Stacks:
    """Where the workers of a node stand, as the supervisor asked."""

    generation: int
    node: str
    workers: tuple[StalledWorker, ...]


@dataclass(frozen=True)
class WorkersEnded:
    """No worker of a generation is left on a node; *failed* says whether one of them failed there."""

    generation: int
    node: str
    failed: bool
    workers: tuple[WorkerEnd, ...]


Message = (
    NodeReady
    | NodeLeaving
    | AgentDied
    | WorkersStarted
    | LogLines
    | WriterReports
    | ProcessLeftBehind
    | Standstill
    | Stacks
    | WorkersEnded
)
_MESSAGES: dict[str, type[Message]] = {
    "node": NodeReady,
    "leaving": NodeLeaving,
    "died": AgentDied,
    "workers": WorkersStarted,
    "lines": LogLines,
    "writer": WriterReports,
    "left_behind": ProcessLeftBehind,
    "standstill": Standstill,
    "stacks": Stacks,
    "ended": WorkersEnded,
}


@dataclass(frozen=True)
class FormGeneration:
    """Start the workers of a generation.

    Attributes:
        generation: Its number.
        nodes: Ids of its nodes in rank order, each with its number of workers.
        failed_at: Unix time of the failure that it answers, if any.
    """

    generation: int
    nodes: tuple[tuple[str, int], ...]
    failed_at: float | None = None


@dataclass(frozen=True)
class EndLaunch:
    """The launch is over; agents leave."""


Order = FormGeneration | EndLaunch
_ORDERS: dict[str, type[Order]] = {"form": FormGeneration, "end": EndLaunch}


def message_to_json(message: Message) -> str:
    """Return the form in which *message* is sent."""
    return _to_json(message, _MESSAGES)


def message_from_json(text: bytes | str) -> Message:
    """Return the message that `message_to_json` gave that form."""
    fields: dict[str, Any] = json.loads(text)
    message_type = _MESSAGES[fields.pop("type")]
    if message_type is NodeReady:
        fields["refused"] = tuple(RefusedModule(*module) for module in fields["refused"])
    elif message_type is WorkersStarted:
        fields["workers"] = tuple(StartedWorker(**worker) for worker in fields["workers"])
    elif message_type is WorkersEnded:
        fields["workers"] = tuple(WorkerEnd(**worker) for worker in fields["workers"])
    elif message_type is Stacks:
        fields["workers"] = tuple(map(_stalled_worker, fields["workers"]))
    elif message_type is LogLines:
        fields["lines"] = tuple(fields["lines"])
    elif message_type is WriterReports:
        fields["reports"] = tuple(fields["reports"])
    return message_type(**fields)


def order_to_json(order: Order) -> str:
    """Return the form in which *order* is published."""
    return _to_json(order, _ORDERS)


def order_from_json(text: bytes | str) -> Order:
    """Return the order that `order_to_json` gave that form."""
    fields: dict[str, Any] = json.loads(text)
    order_type = _ORDERS[fields.pop("type")]
    if order_type is FormGeneration:
        fields["nodes"] = tuple((node, nproc) for node, nproc in fields["nodes"])
    return order_type(**fields)


def _to_json(sent: Message | Order, types: dict[str, type[Message]] | dict[str, type[Order]]) -> str:
    (name,) = (name for name, known_type in types.items() if known_type is type(sent))
    return json.dumps({"type": name, **vars(sent)}, default=vars)


def _stalled_worker(fields: dict[str, Any]) -> StalledWorker:
    frames = tuple(Frame(*frame) for frame in fields["frames"])
    loaders = tuple(LoaderStack(pid, tuple(Frame(*f) for f in stack)) for pid, stack in fields["loaders"])
    return StalledWorker(**{**fields, "frames": frames, "loaders": loaders})
