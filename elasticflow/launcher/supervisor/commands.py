"""Input and output of the lifecycle: events and commands, each a frozen dataclass.

Agents' messages (`protocol/messages.py`) are events as they are. Three commands are answered with an event at once:
`ClaimGeneration`, `ListSnapshots` and `SetSnapshotAside`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import INTERRUPTED
from elasticflow.protocol.messages import (
    Activity,
    AgentDied,
    DevicesChecked,
    LogLines,
    NodeLeaving,
    NodeReady,
    Stacks,
    Standstill,
    WorkersEnded,
    WorkersStarted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.events import Event
    from elasticflow.launcher.agent.agent_process import AgentEnd
    from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
    from elasticflow.protocol.messages import GenerationRequest, StartedWorker


class Instant(NamedTuple):
    """A time on both clocks: the monotonic one for durations, the other for people and other machines."""

    monotonic: float
    unix: float


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimePassed:
    """Time passed and nothing else happened: a generation may be due, or a drain late."""


@dataclass(frozen=True)
class LeaveAsked:
    """A signal, which *reason* names, asks the launch to exit after a step, with a snapshot."""

    reason: str


@dataclass(frozen=True)
class Interrupted:
    """The launch ends now, because of *reason*; the same command resumes the run."""

    reason: str
    exit_code: int = INTERRUPTED


@dataclass(frozen=True)
class NodeLost:
    """A node's agent is gone, and its workers with it.

    Attributes:
        failure_class: A class of `failure_classes.CLASSES`.
    """

    node: str
    failure_class: str
    reason: str


@dataclass(frozen=True)
class AgentEnded:
    """An agent that this process had started has ended; it can be started again."""

    node: str
    end: AgentEnd


@dataclass(frozen=True)
class SnapshotFenced:
    """A snapshot of *generation* was refused, since one of a later generation exists."""

    generation: int


@dataclass(frozen=True)
class GenerationClaimed:
    """The next generation has *number*, and belongs to this launch."""

    number: int


@dataclass(frozen=True)
class RunTakenOver:
    """Another launch of the run has claimed a generation after this launch's last one."""


@dataclass(frozen=True)
class ClaimFailed:
    """No generation can be claimed: the store answers *error*, or nothing."""

    error: str


@dataclass(frozen=True)
class SnapshotsListed:
    """Names of the snapshots that could be restored, newest first; none if the store does not answer."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class SnapshotSetAside:
    """Snapshot *name* is not restored from any more, and that is recorded."""

    name: str


Answer = GenerationClaimed | RunTakenOver | ClaimFailed | SnapshotsListed | SnapshotSetAside
WorkersEvent = WorkersStarted | Standstill | Stacks | WorkersEnded
LifecycleEvent = (
    TimePassed
    | LeaveAsked
    | Interrupted
    | SnapshotFenced
    | (NodeReady | NodeLeaving | NodeLost | AgentDied | AgentEnded)
    | LogLines
    | WorkersEvent
    | DevicesChecked
    | Answer
)


# --- commands -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimGeneration:
    """Claim the number of the next generation; answered with `GenerationClaimed`, `RunTakenOver` or `ClaimFailed`.

    Attributes:
        last: Number of this launch's last generation; 0: none yet.
    """

    reason: str
    last: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class AskWorkers:
    """Ask the workers of *generation* to exit after a step, kill them, or ask for their stacks."""

    request: GenerationRequest
    generation: int


@dataclass(frozen=True)
class CheckDevices:
    """Have the agents of *nodes* check their devices after *generation*; `DevicesChecked` comes from each."""

    nodes: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class ReleaseNode:
    """Have the agent of *node* exit."""

    node: str


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of *node* again."""

    node: str


@dataclass(frozen=True)
class ForgetAgent:
    """The agent of *node* is not started again."""

    node: str


@dataclass(frozen=True)
class RecordEvent:
    """Write an event of the supervisor's own."""

    event: Event
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class UpdateState:
    """Change state.json."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class RecordFailure:
    """Add *entry* to the run's ledger."""

    entry: LedgerEntry


@dataclass(frozen=True)
class ListSnapshots:
    """Say which snapshots there are; answered with `SnapshotsListed`."""


@dataclass(frozen=True)
class SetSnapshotAside:
    """Restore from snapshot *name* no more; answered with `SnapshotSetAside` if the store has done so."""

    name: str
    reason: str


@dataclass(frozen=True)
class ClearSnapshot:
    """Take back that snapshot *name* was set aside, and record that, if the store has done so."""

    name: str
    reason: str


@dataclass(frozen=True)
class FormGeneration:
    """Have nodes start the workers of a generation.

    Attributes:
        nodes: Ids of its nodes in rank order, each with its number of workers.
        failed_at: Monotonic time of the failure that it answers, if any.
    """

    generation: int
    nodes: tuple[tuple[str, int], ...]
    failed_at: float | None = None


@dataclass(frozen=True)
class AddWorkers:
    """Put workers that have started to those of the generation in state.json."""

    workers: tuple[StartedWorker, ...]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a launch: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: Event
    fields: dict[str, Any]


Command = (
    ClaimGeneration
    | FormGeneration
    | AskWorkers
    | CheckDevices
    | ReleaseNode
    | StartAgent
    | ForgetAgent
    | RecordEvent
    | UpdateState
    | AddWorkers
    | Activity
    | RecordFailure
    | ListSnapshots
    | SetSnapshotAside
    | ClearSnapshot
)
