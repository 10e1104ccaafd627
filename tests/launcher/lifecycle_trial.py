"""A lifecycle whose clock, agents, snapshots and generation numbers are the test's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from elasticflow import events
from elasticflow.compiler.plan.launch_plan import RestartPlan
from elasticflow.launcher.supervisor.commands import (
    AddWorkers,
    AgentEnded,
    AskWorkers,
    CheckDevices,
    ClaimFailed,
    ClaimGeneration,
    ClearSnapshot,
    ForgetAgent,
    FormGeneration,
    GenerationClaimed,
    Instant,
    ListSnapshots,
    NodeLost,
    RecordEvent,
    RecordFailure,
    ReleaseNode,
    RunTakenOver,
    SetSnapshotAside,
    SnapshotSetAside,
    SnapshotsListed,
    StartAgent,
    TimePassed,
    UpdateState,
)
from elasticflow.launcher.supervisor.lifecycle import Lifecycle, RunSoFar
from elasticflow.launcher.supervisor.nodes import Nodes
from elasticflow.protocol.messages import (
    Activity,
    LogLines,
    NodeReady,
    RefusedModule,
    WorkerEnd,
    WorkersEnded,
)

if TYPE_CHECKING:
    from elasticflow.launcher.agent.agent_process import AgentEnd
    from elasticflow.launcher.supervisor.commands import Answer, Command, LifecycleEvent, Verdict
    from elasticflow.launcher.supervisor.generations import Generation

GRACE_S = 30.0


@dataclass
class Agents:
    """What the agents were asked for."""

    formed: list[tuple[int, tuple[str, ...], float | None]] = field(default_factory=list)
    requests: list[tuple[str, int]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    started_again: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    checked: list[tuple[tuple[str, ...], int]] = field(default_factory=list)


@dataclass
class Snapshots:
    """The snapshots of a run, newest first, and why some of them are set aside."""

    names: list[str] = field(default_factory=list)
    set_aside: dict[str, str] = field(default_factory=dict)
    answer: bool = True

    def usable(self) -> tuple[str, ...]:
        """Return those that could be restored, newest first."""
        return tuple(name for name in self.names if name not in self.set_aside)


@dataclass
class Trial:
    """A lifecycle whose clock, agents, snapshots and generation numbers are the test's."""

    budget: int = 2
    least: int = 1
    most: int = 1
    shard: int = 1
    may_offload: bool = False
    agents: Agents = field(default_factory=Agents)
    snapshots: Snapshots = field(default_factory=Snapshots)
    records: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    claimed: list[str] = field(default_factory=list)
    clock: float = 1000.0
    clock_ahead_s: float = 0.0  # of the wall clock

    def __post_init__(self) -> None:
        self.plan(self.budget)

    def plan(self, budget: int) -> None:
        """Begin anew with a budget of so many restarts."""
        plan = RestartPlan(
            budget=budget,
            refill_s=None,
            refill_steps=None,
            refill_epochs=None,
            hang_timeout_s=600,
            grace_s=GRACE_S,
        )
        self.nodes = Nodes(self.least, self.most, self.shard)
        self.lifecycle = Lifecycle(plan, self.nodes, RunSoFar(), may_offload=self.may_offload)

    # --- what happens -----------------------------------------------------------------------------------

    def on(self, event: LifecycleEvent) -> None:
        """Tell the lifecycle what happened, and do what it says."""
        pending: deque[LifecycleEvent] = deque([event])
        while pending:
            now = Instant(self.clock, self.clock + self.clock_ahead_s)
            for command in self.lifecycle.on(pending.popleft(), now):
                if (answer := self.run(command)) is not None:
                    pending.append(answer)

    def begin(self) -> None:
        """Have the node join and the first generation formed."""
        self.join()
        self.pass_time()

    def join(self, node: str = "n0", *, nproc: int = 2, rank: int | None = None, **refused: str) -> None:
        """Say that a node is ready, whose fork server has *refused* modules for reasons."""
        modules = tuple(RefusedModule(module, reason) for module, reason in refused.items())
        self.on(NodeReady(node, "host", nproc, rank, modules))

    def pass_time(self) -> None:
        """Say that time has passed."""
        self.on(TimePassed())

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock += seconds
        self.pass_time()

    def log(self, event: str, /, **fields: Any) -> None:
        """Have a worker write a line."""
        self.on(LogLines(({"event": event, **fields},), held=None))

    def step(self, step: int, *, finished: bool = False) -> None:
        """Have the generation finish a step."""
        self.log(events.STEP, step=step, epoch=0, loss=0.0)
        if finished:
            self.log(events.TRAINING_FINISHED, step=step, epoch=0)

    def leave(self, node: str = "n0") -> None:
        """Have all workers of a node leave with code 0."""
        workers = (worker(0, 0), worker(1, 0))
        self.on(WorkersEnded(self.generation.number, node, failed=False, workers=workers))

    def killed(self, node: str) -> None:
        """Have a node's agent say that it killed its workers."""
        workers = (worker(2, -9, ended_by_us=True), worker(3, -9, ended_by_us=True))
        self.on(WorkersEnded(self.generation.number, node, failed=False, workers=workers))

    def fail(self, *workers: WorkerEnd, generation: int | None = None, node: str = "n0") -> None:
        """Have the workers fail: by default rank 1 killed, rank 0 ended by the agent."""
        number = self.generation.number if generation is None else generation
        ends = workers or (worker(0, -9, ended_by_us=True), worker(1, -9))
        self.on(WorkersEnded(number, node, failed=True, workers=ends))

    def lose(self, node: str) -> None:
        """Have a node give no sign of life."""
        self.on(NodeLost(node, "node_lost", "it has given no sign of life"))

    def agent_died(self, node: str, end: AgentEnd) -> bool:
        """Have an agent of this machine end; return whether it was started again."""
        before = len(self.agents.started_again)
        self.on(AgentEnded(node, end))
        return len(self.agents.started_again) > before

    # --- what is done -----------------------------------------------------------------------------------

    def run(self, command: Command) -> Answer | None:  # noqa: C901, PLR0912  # one line for each command
        """Do what the lifecycle says; return the answer, if there is one."""
        match command:
            case ClaimGeneration():
                return self._claim(command)
            case FormGeneration():
                names = tuple(node for node, _ in command.nodes)
                self.agents.formed.append((command.generation, names, command.failed_at))
            case AskWorkers():
                self.agents.requests.append((command.request, command.generation))
            case CheckDevices():
                self.agents.checked.append((command.nodes, command.generation))
            case ReleaseNode():
                self.agents.released.append(command.node)
            case StartAgent():
                self.agents.started_again.append(command.node)
            case ForgetAgent():
                self.agents.forgotten.append(command.node)
            case RecordEvent():
                self.records.append({"event": command.event, **command.fields})
            case Activity():
                self.state["activities"] = {command.node: command.subject}
            case AddWorkers():
                self.state["workers"] = [*self.state.get("workers", []), *map(vars, command.workers)]
            case UpdateState():
                self.state.update(command.fields)
            case RecordFailure():
                pass
            case ListSnapshots():
                return SnapshotsListed(self.snapshots.usable() if self.snapshots.answer else ())
            case SetSnapshotAside():
                self.snapshots.set_aside[command.name] = command.reason
                self._record_snapshot(events.SNAPSHOT_REJECTED, command)
                return SnapshotSetAside(command.name)
            case ClearSnapshot():
                del self.snapshots.set_aside[command.name]
                self._record_snapshot(events.SNAPSHOT_CLEARED, command)
            case _:
                assert_never(command)
        return None

    def claim(self, reason: str, last: int) -> int | None:
        """Return the next generation number."""
        self.claimed.append(reason)
        return len(self.claimed)

    def _claim(self, wanted: ClaimGeneration) -> Answer:
        try:
            number = self.claim(wanted.reason, wanted.last)
        except OSError as error:
            return ClaimFailed(str(error))
        return RunTakenOver() if number is None else GenerationClaimed(number)

    def _record_snapshot(self, event: str, command: SetSnapshotAside | ClearSnapshot) -> None:
        self.records.append({"event": event, "name": command.name, "reason": command.reason})

    # --- what came of it --------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        """The generation that runs."""
        assert self.lifecycle.generation is not None, self.lifecycle.verdict
        return self.lifecycle.generation

    @property
    def verdict(self) -> Verdict:
        """How the launch ended."""
        assert self.lifecycle.verdict is not None
        return self.lifecycle.verdict

    @property
    def ended(self) -> tuple[str, int]:
        """Status and exit code of the verdict."""
        return self.verdict.status, self.verdict.exit_code

    def names(self) -> list[str]:
        """Return the names of the events so far."""
        return [record["event"] for record in self.records]


def worker(rank: int, code: int, *, ended_by_us: bool = False, stderr: str = "") -> WorkerEnd:
    """Return how one worker ended, as an agent tells it."""
    return WorkerEnd(rank, 100 + rank, code, 5.0 + rank, ended_by_us, oom_killed=False, stderr=stderr)
