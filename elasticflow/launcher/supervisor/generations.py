"""The running generation, as far as the supervisor knows it, and the time and nodes of the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from elasticflow import events
from elasticflow.launcher.rendezvous.supervisor_channel import on_own_clock
from elasticflow.launcher.restarts.failures import Failure, Report, first_failure
from elasticflow.launcher.supervisor.commands import (
    AddWorkers,
    AskWorkers,
    ClaimGeneration,
    Command,
    FormGeneration,
    RecordEvent,
    UpdateState,
)
from elasticflow.protocol.messages import Activity, Stacks, Standstill, WorkersEnded, WorkersStarted

if TYPE_CHECKING:
    from elasticflow.events import EventRecord
    from elasticflow.launcher.supervisor.commands import Instant, WorkersEvent
    from elasticflow.launcher.supervisor.nodes import Node, Nodes
    from elasticflow.protocol.messages import StalledWorker, StartedWorker, WorkerEnd

TOO_LATE = "the grace ended before the workers left"


@dataclass(frozen=True)
class Cause:
    """The cause of a generation's failure, or of a generation that could not be formed.

    Attributes:
        failure_class: A class of `failure_classes.CLASSES`.
        node: Id of the node; empty if no node is to blame.
        failure: The worker that failed first; None if no worker did.
        at: Unix time of the first end of a worker; None if none is known.
    """

    failure_class: str
    error: str
    node: str = ""
    failure: Failure | None = None
    at: float | None = None

    def age_s(self, now: Instant, heard_at: float | None) -> float | None:
        """Return the seconds since a worker ended, or for a lost node or a hang the seconds since a worker was heard.

        Args:
            heard_at: Monotonic time of the last line that a worker wrote, if any did.
        """
        is_seen = self.failure is not None and self.failure_class != "hang"
        failed_at, on_same_clock = (self.at, now.unix) if is_seen else (heard_at, now.monotonic)
        return None if failed_at is None else round(max(0.0, on_same_clock - failed_at), 3)


@dataclass(frozen=True)
class Drain:
    """The reason why the workers of a generation were asked to exit.

    Attributes:
        ends: The launch ends afterwards; otherwise the next generation follows.
        outcome: `failure_classes.Outcome` of the generation.
        asked: Monotonic time at which they were asked.
    """

    ends: bool
    outcome: str
    reason: str
    asked: float


@dataclass
class Generation:
    """One worker group.

    Attributes:
        number: Number over the whole run, the same on every node.
        nodes: Ids of its nodes, in rank order.
        step: Last step that it is known to have finished; None before its first.
        epoch: Epoch of that step; None if unknown.
        is_on_cpu: Training has started, on the CPU.
        restored_from: Name of the snapshot that all ranks resumed from, once they had verified it.
        is_finished: Rank 0 has reported that training reached its end.
        has_left: Rank 0 has reported that all ranks leave before that end, as they were asked to.
        stopped: The reason for which the job's own code ended training early; None: it did not.
        is_stopping: The workers are being killed, since a worker has failed or a node is lost.
        drain: The request to its workers to exit; None: there was no request.
        raised: The `worker.raised` line of each rank that wrote one.
        stalled_nodes: Nodes whose workers have all stood still for too long, or wait for a stopped worker.
        stacks: The stacks that nodes have reported, by node.
        stacks_asked: Monotonic time at which the stacks were requested.
        hung: Activity of the rank that all others wait for, in the form of a `worker.raised` line.
        workers: The workers of each node on which they have started.
        ended: The end of the workers of each node that has reported it.
        behind_s: Seconds that the clock of each of these nodes is behind this machine's; 0 if the clocks agree.
        lost: Class and reason of each node that was lost while the generation ran.
    """

    number: int
    nodes: tuple[str, ...] = ()
    step: int | None = None
    epoch: int | None = None
    is_on_cpu: bool = False
    restored_from: str | None = None
    is_finished: bool = False
    has_left: bool = False
    stopped: str | None = None
    is_stopping: bool = False
    drain: Drain | None = None
    raised: dict[int, EventRecord] = field(default_factory=dict)
    stalled_nodes: set[str] = field(default_factory=set)
    stacks: dict[str, tuple[StalledWorker, ...]] = field(default_factory=dict)
    stacks_asked: float | None = None
    hung: dict[int, EventRecord] = field(default_factory=dict)
    workers: dict[str, tuple[StartedWorker, ...]] = field(default_factory=dict)
    ended: dict[str, WorkersEnded] = field(default_factory=dict)
    behind_s: dict[str, float] = field(default_factory=dict)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    _running: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have all of its nodes run."""
        self._running = dict.fromkeys(self.nodes)

    def hear(self, line: EventRecord) -> None:
        """Take in a line of a worker's log."""
        match line["event"]:
            case events.STEP:
                self.step, self.epoch = line["step"], line["epoch"]
            case events.TRAINING_FIRST_STEP if self.step is None:
                self.step = line["step"]  # logging.every may leave it out
            case events.TRAINING_STARTED:
                self.is_on_cpu = line["device"] == "cpu"
            case events.SNAPSHOT_CHOSEN:
                self.restored_from = line["name"]
            case events.WORKER_RAISED:
                self.raised.setdefault(line["rank"], line)
            case events.TRAINING_STOPPED:
                by = "" if line["by_rank"] is None else f"rank {line['by_rank']}: "
                self.stopped = f"{by}{line['reason']}"
            case events.TRAINING_FINISHED:
                self.is_finished = True
            case events.TRAINING_LEFT:
                self.has_left = True
            case _:
                pass

    def take(self, message: WorkersEvent, now: float) -> list[Command]:
        """Take in what an agent says about its workers; if one of them failed, those of all nodes are killed.

        Args:
            now: Unix time.
        """
        node = message.node
        match message:
            case WorkersStarted():
                self.workers[node] = message.workers
                return [AddWorkers(message.workers)]
            case Standstill(is_one_stopped=True):
                self.stalled_nodes.update(self._running)
            case Standstill(is_so=True):
                self.stalled_nodes.add(node)
            case Standstill():
                self.stalled_nodes.discard(node)
            case Stacks():
                self.stacks[node] = message.workers
            case WorkersEnded():
                self.ended[node] = message
                self.behind_s[node] = on_own_clock(0.0, message.sent_at, now)
                self._running.pop(node, None)
                if message.failed:
                    return self.stop()
                if self._running and not self.is_stopping:
                    return [Activity.of_peers(next(iter(self.ended)), "node", self._running, self.ended)]
            case _:
                assert_never(message)
        return []

    def lose(self, node: str, failure_class: str, reason: str, *, also_alone: bool = False) -> list[Command]:
        """Mark the running workers of *node* as lost, and kill the rest of the group."""
        if node not in self._running:
            return []
        self.lost[node] = (failure_class, reason)
        self._running.pop(node, None)
        return self.stop(also_alone=also_alone)

    def stop(self, *, also_alone: bool = False) -> list[Command]:
        """Have the workers of all nodes killed: they would wait for the one that failed.

        Where there is one node only, its agent has killed them by itself, unless *also_alone*.
        """
        if self.is_stopping:
            return []
        self.is_stopping = True
        return [AskWorkers("stop", self.number)] if also_alone or len(self.nodes) > 1 else []

    def ask_to_leave(self, drain: Drain) -> list[Command]:
        """Have the workers exit after a step; a second request changes nothing."""
        was_asked, self.drain = self.drain is not None, drain
        return [] if was_asked else [AskWorkers("drain", self.number)]

    @property
    def is_over(self) -> bool:
        """True if no worker of any node is left."""
        return not self._running

    @property
    def has_left_well(self) -> bool:
        """True if each worker exited with code 0 by itself, even in the moment in which all were to be killed."""
        ends = [worker for ended in self.ended.values() for worker in ended.workers]
        return (
            not self.lost and bool(ends) and all(end.exit_code == 0 and not end.ended_by_us for end in ends)
        )

    @property
    def running(self) -> tuple[str, ...]:
        """Its nodes that have neither told how their workers ended nor are lost."""
        return tuple(self._running)

    def cause(self) -> Cause:
        """Return why its workers were killed: a lost node, else the worker that failed first, else a drain that was late."""
        ends = [(node, worker) for node, ended in self.ended.items() for worker in ended.workers]
        at = min((worker.at + self.behind_s[node] for node, worker in ends), default=None)
        for node, (failure_class, error) in self.lost.items():
            return Cause(failure_class, error, node, at=at)
        first = first_failure([self._report(*end) for end in ends], is_finished=self.is_finished)
        if first is not None:
            return Cause(first.failure_class, first.error, first.node, first, at)
        if self.hung:  # the rank that the others waited for has ended well since
            return Cause("hang", next(iter(self.hung.values()))["error"], at=at)
        assert self.drain is not None, "a group that was killed has a cause"
        return Cause(self.drain.outcome, TOO_LATE, at=at)

    def suspects(self, cause: Cause) -> tuple[str, ...]:
        """Return its nodes whose devices may be at fault: where it failed because of *cause*, or a worker did not end.

        A worker on the CPU that does not end is in a call of something else, such as a file system.
        """
        nodes = [
            node
            for node, ended in self.ended.items()
            if not self.is_on_cpu and any(worker.remains for worker in ended.workers)
        ]
        if cause.failure is not None and cause.failure.suspects_device:
            nodes.append(cause.node)
        return tuple(dict.fromkeys(nodes))

    def _report(self, node: str, worker: WorkerEnd) -> Report:
        has_hung = worker.rank in self.hung
        raised = self.hung.get(worker.rank) or self.raised.get(worker.rank)
        end = vars(worker) | {"ended_by_us": worker.ended_by_us and not has_hung}
        return Report(**end, node=node, raised=raised, behind_s=self.behind_s[node])


class _Planned(NamedTuple):
    """A generation to be formed not before the monotonic time *at*, in answer to a failure at *failed_at*, if any."""

    at: float
    reason: str
    failed_at: float | None = None


class Formation:
    """Forms the generations of a launch, one after the other; begins with one for the reason *first*.

    Attributes:
        last_number: The number of the last one; 0 before the first.
    """

    def __init__(self, first: str) -> None:
        self._planned: _Planned | None = _Planned(0.0, first)
        self._claiming: tuple[_Planned, tuple[Node, ...]] | None = None
        self._has_told_who_is_awaited = False
        self.last_number = 0

    def plan(self, reason: str, at: float, failed_at: float | None = None) -> None:
        """Have a generation formed from the monotonic time *at* on; one that is planned is put off, and keeps its reason."""
        before = self._planned
        self._planned = (
            _Planned(at, reason, failed_at) if before is None else before._replace(at=max(at, before.at))
        )

    def form(self, nodes: Nodes, now: float) -> list[Command]:
        """Return what begins the planned generation, if it is time and its *nodes* are there; its number is claimed first."""
        if self._planned is None or now < self._planned.at:
            return []
        chosen = nodes.chosen(now, is_first=self.last_number == 0)
        if not chosen:
            if not len(nodes) or nodes.are_enough or self._has_told_who_is_awaited:
                return []
            self._has_told_who_is_awaited = True
            return [RecordEvent(events.NODE_AWAITED, {"present": len(nodes), "least": nodes.least})]
        planned, self._planned, self._has_told_who_is_awaited = self._planned, None, False
        self._claiming = (planned, chosen)
        return [ClaimGeneration(planned.reason, self.last_number, tuple(node.name for node in chosen))]

    def claimed(self, number: int) -> tuple[Generation, list[Command]]:
        """Return the generation whose *number* is claimed, and what starts its workers."""
        assert self._claiming is not None, "nothing is claimed unasked"
        (planned, nodes), self._claiming = self._claiming, None
        self.last_number = number
        world_size = sum(node.nproc for node in nodes)
        members = tuple(node.name for node in nodes)
        fields: dict[str, Any] = {"world_size": world_size, "nodes": len(nodes), "reason": planned.reason}
        fields["members"] = list(members)
        commands: list[Command] = [
            RecordEvent(events.GENERATION_STARTED, fields),
            UpdateState({"generation": number, "workers": []}),
            FormGeneration(number, tuple((node.name, node.nproc) for node in nodes), planned.failed_at),
        ]
        return Generation(number, members), commands
