"""Messages between the processes of a launch, sent through its control store: one frozen dataclass for each.

Agents, and machines that joined, send a `Message` to the supervisor, which answers with an `Order`; `MESSAGES` and
`ORDERS` write and read them. The receiver matches on the types of messages, with `assert_never` at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from elasticflow.events import EventRecord  # noqa: TC001  # the codec reads the fields' types
from elasticflow.protocol.json_codec import MessageCodec
from elasticflow.protocol.worker_environment import DeviceUsage  # noqa: TC001  # as above

if TYPE_CHECKING:
    from collections.abc import Collection

    from elasticflow.events import Event

# Files in which a rank waits for others, or for the store that it shares with them.
_WAITS = re.compile(
    r"/torch/distributed/|/torch/nn/parallel/distributed\.py$|/elasticflow/runtime/(?:process/process_group|training/fixed_order_sum|snapshot/writer_connection)\.py$"
)
# The function in which DistributedDataParallel waits.
_BACKWARD = "_engine_run_backward"
MOST_PROFILED = 1000
"""Steps of a trace."""
GenerationRequest = Literal["drain", "stop", "stacks", "profile"]
"""A supervisor's request to a generation: exit after a step, be killed now, send the workers' stacks, trace steps."""


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
    """A worker that runs; `state.json` lists them in this form.

    Attributes:
        pid: Process id; whoever signals it compares the last three first (`ProcessRecord`).
        started: Start of the worker's process, in clock ticks after the boot.
    """

    rank: int
    pid: int
    node: str
    host: str = ""
    boot_id: str | None = None
    started: int | None = None


@dataclass(frozen=True)
class StalledWorker:
    """A worker that makes no progress.

    Attributes:
        seconds: Time without progress.
        limit_s: Longest time without progress that is no hang in that phase.
        state: State of the process as the kernel has it: R, S, D, T; empty where the kernel does not tell.
        frames: Stack of the main thread, innermost frame first; empty if it did not answer.
        loaders: The stacks of its loader processes if it waits for them.
        log: File that holds all of its stacks.
        dump: File that NCCL's flight recorder has dumped; empty if there is none.
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
    dump: str = ""

    @property
    def waits_for_others(self) -> bool:
        """True if the worker is in a call that waits for other ranks, or for their common store."""
        innermost = self.frames[:1]
        return any(_WAITS.search(frame.file) or frame.function == _BACKWARD for frame in innermost)


@dataclass(frozen=True)
class WorkerEnd:
    """The end of one worker.

    Attributes:
        exit_code: As `Popen.returncode` gives it: negative is a signal.
        at: Unix time of its end.
        ended_by_us: The agent killed it, after another worker's failure for instance; such an end is no failure.
        oom_killed: It failed, and the kernel killed it, or a child of it, because memory ran out.
        stderr: The end of its standard error, if it failed.
        remains: State of its process as the kernel has it, if it did not end although it was killed; else empty.
    """

    rank: int
    pid: int
    exit_code: int
    at: float
    ended_by_us: bool
    oom_killed: bool
    stderr: str
    remains: str = ""


@dataclass(frozen=True)
class NodeReady:
    """A node's agent is ready to start workers: everything is imported.

    Attributes:
        node_rank: The node's place among all nodes, where the rendezvous is static; else None.
        refused: Modules that its fork server could not import beforehand.
        has_own_folder: The machine that leads does not see the node's run folder.
    """

    node: str
    host: str
    nproc: int
    node_rank: int | None = None
    refused: tuple[RefusedModule, ...] = ()
    has_own_folder: bool = False


@dataclass(frozen=True)
class NodeLeaving:
    """A node is about to be taken away; its workers are to exit after a step."""

    node: str


@dataclass(frozen=True)
class AgentDied:
    """A machine that joined reports that its agent has ended, for the reason *error*.

    Attributes:
        failure_class: A class of `failure_classes.CLASSES`.
    """

    node: str
    error: str
    failure_class: str = "agent_lost"


@dataclass(frozen=True)
class WorkersStarted:
    """The workers of a generation run on one node."""

    generation: int
    node: str
    workers: tuple[StartedWorker, ...]


@dataclass(frozen=True)
class ProfileRequest:
    """A request of `elasticflow profile` for traces.

    The command writes it to the run folder, where requests are numbered from 1. The supervisor publishes it to the agents, which
    write its number into the heartbeat slots of the ranks that are meant. A worker reads it at the end of its step.

    Attributes:
        steps: Number of steps after one that warms up; 1 to `MOST_PROFILED`.
        shapes: Trace the shapes of operators' inputs.
        memory: Trace the memory that operators allocate and free.
        stacks: Trace the Python functions that called them.
    """

    steps: int
    ranks: tuple[int, ...] = (0,)
    shapes: bool = False
    memory: bool = False
    stacks: bool = False


@dataclass(frozen=True)
class PublishedProfile:
    """A request as the supervisor gives it to the agents, which may see another run folder."""

    number: int
    request: ProfileRequest


@dataclass(frozen=True)
class LogLines:
    """Lines of the workers' logs that the supervisor follows, in the order they were written.

    Attributes:
        held: Newest step whose state all workers of the node hold in memory; None if one of them holds none.
    """

    lines: tuple[EventRecord, ...]
    held: int | None


def report(event: Event, /, **fields: Any) -> EventRecord:
    """Return *event*, with its own *fields*, in the form that `NodeReports` has."""
    return {"event": event, **fields}


@dataclass(frozen=True)
class NodeReports:
    """Reports of a node's agent or snapshot writer: events of `elasticflow.events` without the fields that all events have."""

    reports: tuple[EventRecord, ...]


LINGER = "linger"
"""Phase of an activity: some ranks, or nodes, have ended well, and others are waited for."""
_MOST_NAMED = 4


def _listed(what: str, names: Collection[object]) -> str:
    shown = ", ".join(map(str, list(names)[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{what}{'s' if len(names) > 1 else ''} {shown}{more}"


@dataclass(frozen=True)
class Activity:
    """A node's present activity, once it has lasted for longer than a moment; an empty phase says that it is over.

    Attributes:
        phase: `import` before it has workers, then that of the worker for which its others seem to wait; `LINGER`.
        subject: The module that is imported, `torch.compile` if the job compiles its model, or the awaited ranks or nodes.
        step: Steps that this worker has finished.
    """

    node: str
    phase: str
    subject: str = ""
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def of_peers(
        cls, node: str, what: str, left: Collection[object], ended: Collection[object], seconds: float = 0.0
    ) -> Activity:
        """Return the activity of waiting until *left* have ended, too, beside *ended*; *what*: `rank` or `node`."""
        return cls(
            node, LINGER, f"{_listed(what, left)} to end, as {_listed(what, ended)} did", 0, round(seconds, 3)
        )


class PrintedLine(NamedTuple):
    """A line that a worker printed on `stdout` or `stderr`."""

    stream: str
    text: str


@dataclass(frozen=True)
class Printed:
    """Lines that rank 0 printed, as many as a person can follow, and the number of lines left out before them."""

    generation: int
    lines: tuple[PrintedLine, ...]
    left_out: int


@dataclass(frozen=True)
class Warned:
    """A warning of a worker's code or libraries.

    Attributes:
        node: Node of the worker that gave it first.
        category: Python's class of the warning; `torch`; level and name of a logger.
        place: File and line; empty if unknown.
        text: The first message of this category from this place.
        times: How often all workers of the node gave it since the message before.
    """

    node: str
    rank: int
    in_generation: int
    category: str
    place: str
    text: str
    times: int = 1


class RankFigures(NamedTuple):
    """Figures of a worker over its last steps.

    Attributes:
        windows: How often the worker has written its figures.
        own_s: Seconds of a step that are the worker's own, without waiting for others: the median.
        step_s: Seconds of a step: the mean.
        device: Device of the worker's model, such as `cuda:0`.
        usage: Memory and use of that device; None on the CPU.
    """

    rank: int
    windows: int
    own_s: float
    step_s: float
    device: str
    usage: DeviceUsage | None = None


@dataclass(frozen=True)
class NodeFigures:
    """Figures of a node's workers in a generation."""

    generation: int
    node: str
    ranks: tuple[RankFigures, ...]


@dataclass(frozen=True)
class Standstill:
    """All workers of a node have made no progress for too long (*is_so*), or one makes progress again.

    Attributes:
        is_one_stopped: A signal has stopped the process of a worker, for which those of other nodes wait.
    """

    generation: int
    node: str
    is_so: bool
    is_one_stopped: bool = False


@dataclass(frozen=True)
class Stacks:
    """The stacks of a node's workers, as the supervisor asked."""

    generation: int
    node: str
    workers: tuple[StalledWorker, ...]


@dataclass(frozen=True)
class WorkersEnded:
    """No worker of a generation is left on a node.

    Attributes:
        sent_at: Unix time of the message, on the node's clock.
    """

    generation: int
    node: str
    failed: bool
    workers: tuple[WorkerEnd, ...]
    sent_at: float | None = None


@dataclass(frozen=True)
class DevicesChecked:
    """The devices of a node were checked after *generation*, as the supervisor asked.

    Attributes:
        devices: Number of devices that have computed a known sum right.
        faults: Errors for which a device is not to be used, each with the device's name.
        notes: Errors that a device outlives, and the reason why it could not be checked.
    """

    generation: int
    node: str
    devices: int
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file of a node's run folder, as the supervisor asked.

    Attributes:
        path: From the run folder.
        data: The bytes, in base64.
        is_anew: The bytes replace all earlier pieces of the file.
    """

    node: str
    path: str
    offset: int
    data: str
    is_anew: bool = False


@dataclass(frozen=True)
class FilesSent:
    """A node has sent all that the request *number* asked for."""

    node: str
    number: int


Message = (
    NodeReady
    | NodeLeaving
    | AgentDied
    | WorkersStarted
    | LogLines
    | NodeReports
    | Activity
    | Printed
    | Warned
    | NodeFigures
    | Standstill
    | Stacks
    | WorkersEnded
    | DevicesChecked
    | FilePiece
    | FilesSent
)
MESSAGES: MessageCodec[Message] = MessageCodec(*get_args(Message))


@dataclass(frozen=True)
class GenerationFormed:
    """A generation is formed: its nodes start their workers.

    The order does not list the nodes: an agent reads the block of `NodeParts` in which its node would stand.

    Attributes:
        nodes: Number of its nodes.
        world_size: Workers of all nodes.
        blocks: Number of blocks of the nodes' parts (`store_keys.block_of`).
        failed_s: Seconds since the failure for which it is formed, if any.
    """

    generation: int
    nodes: int
    world_size: int
    blocks: int
    failed_s: float | None = None


class NodePart(NamedTuple):
    """A node's part in a generation: its number among the nodes from 0, the rank of its first worker, its workers."""

    group_rank: int
    first_rank: int
    nproc: int


@dataclass(frozen=True)
class EndLaunch:
    """The launch is over; agents exit."""


@dataclass(frozen=True)
class FilesWanted:
    """Nodes with run folders of their own are to send files (`launcher/rendezvous/requests.py`).

    Attributes:
        logged: Also send the points that hooks logged, of all generations.
        number: Number of the supervisor's request; 0: a command has left the request for the supervisor.
    """

    generation: int
    logged: bool = False
    number: int = 0


Order = GenerationFormed | EndLaunch
ORDERS: MessageCodec[Order] = MessageCodec(*get_args(Order))


@dataclass(frozen=True)
class NodeParts:
    """The parts of some nodes in a generation, by the id of the node."""

    nodes: dict[str, NodePart]
