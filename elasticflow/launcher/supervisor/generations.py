"""The generation that runs, as far as the supervisor knows it, and which one is formed next, when and of whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from elasticflow import events
from elasticflow.launcher.restarts.failures import Failure, Report, first_failure
from elasticflow.launcher.supervisor.commands import ClaimGeneration, Command, RecordEvent, UpdateState
from elasticflow.protocol.messages import FormGeneration

if TYPE_CHECKING:
    from elasticflow.events import EventRecord
    from elasticflow.launcher.supervisor.nodes import Node, Nodes
    from elasticflow.protocol.messages import StalledWorker, StartedWorker, WorkerEnd, WorkersEnded


@dataclass(frozen=True)
class Cause:
    """Why a generation failed.

    Attributes:
        node: Where.
        failure_class: A class of `failure_classes.CLASSES`.
        error: In one line.
        failure: The worker that failed first; None if it was a whole node.
    """

    node: str
    failure_class: str
    error: str
    failure: Failure | None = None


@dataclass
class Generation:
    """One worker group.

    Attributes:
        number: Its number over the whole run, the same on every node.
        nodes: Ids of its nodes, in rank order.
        step: Last step that it is known to have finished, or None when it has finished none yet.
        epoch: Epoch of that step, where it was told.
        restored_from: Name of the snapshot that all ranks went on from, once they had verified it.
        is_finished: Rank 0 has said that training reached its end.
        stopped: Why the job's own code ended training before its length, if it did.
        is_stopping: Its workers are being killed, since one has failed or a node is lost.
        raised: The `worker.raised` line of each rank that wrote one.
        stalled_nodes: Nodes whose workers have all stood still for too long.
        stacks: Where the workers of each node stand that has said so, once it was asked.
        stacks_asked: When it was, on the monotonic clock.
        hung: In the form of a `worker.raised` line, what the rank was doing that all others wait for.
        workers: The workers of each node on which they have started.
        ended: How the workers of each node ended that has said so.
        lost: Class and reason of each node that was lost while it ran.
    """

    number: int
    nodes: tuple[str, ...] = ()
    step: int | None = None
    epoch: int | None = None
    restored_from: str | None = None
    is_finished: bool = False
    stopped: str | None = None
    is_stopping: bool = False
    raised: dict[int, EventRecord] = field(default_factory=dict)
    stalled_nodes: set[str] = field(default_factory=set)
    stacks: dict[str, tuple[StalledWorker, ...]] = field(default_factory=dict)
    stacks_asked: float | None = None
    hung: dict[int, EventRecord] = field(default_factory=dict)
    workers: dict[str, tuple[StartedWorker, ...]] = field(default_factory=dict)
    ended: dict[str, WorkersEnded] = field(default_factory=dict)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)

    def hear(self, line: EventRecord) -> None:
        """Take in a line of a worker's log."""
        match line["event"]:
            case events.STEP:
                self.step, self.epoch = line["step"], line["epoch"]
            case events.TRAINING_FIRST_STEP if self.step is None:
                self.step = line["step"]  # logging.every may leave it out
            case events.SNAPSHOT_CHOSEN:
                self.restored_from = line["name"]
            case events.WORKER_RAISED:
                self.raised.setdefault(line["rank"], line)
            case events.TRAINING_STOPPED:
                self.stopped = f"rank {line['by_rank']}: {line['reason']}"
            case events.TRAINING_FINISHED:
                self.is_finished = True
            case _:
                pass

    @property
    def is_over(self) -> bool:
        """Whether no worker of any node is left."""
        return not self.running

    @property
    def running(self) -> tuple[str, ...]:
        """Its nodes that have neither told how their workers ended nor are lost."""
        return tuple(node for node in self.nodes if node not in self.ended and node not in self.lost)

    @property
    def started(self) -> tuple[StartedWorker, ...]:
        """Its workers on all nodes on which they have started."""
        return tuple(worker for node in self.nodes for worker in self.workers.get(node, ()))

    @property
    def failed_at(self) -> float | None:
        """Unix time of the first end of a worker, as far as nodes have told."""
        return min((w.at for ended in self.ended.values() for w in ended.workers), default=None)

    def cause(self) -> Cause | None:
        """Return why it failed: a lost node, else the worker that failed first; None if no worker failed by itself."""
        for node, (failure_class, error) in self.lost.items():
            return Cause(node, failure_class, error)
        reports = [self._report(node, w) for node, ended in self.ended.items() for w in ended.workers]
        first = first_failure(reports, is_finished=self.is_finished)
        return None if first is None else Cause(first.node, first.failure_class, first.error, first)

    def _report(self, node: str, worker: WorkerEnd) -> Report:
        return Report(
            rank=worker.rank,
            exit_code=worker.exit_code,
            raised=self.hung.get(worker.rank) or self.raised.get(worker.rank),
            time=worker.at,
            node=node,
            pid=worker.pid,
            ended_by_us=worker.ended_by_us and worker.rank not in self.hung,
            oom_killed=worker.oom_killed,
            stderr=worker.stderr,
        )


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
            if not 0 < len(nodes) < nodes.least or self._has_told_who_is_awaited:
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
        fields = {"world_size": world_size, "nodes": len(nodes), "reason": planned.reason}
        commands: list[Command] = [
            RecordEvent(events.GENERATION_STARTED, fields),
            UpdateState({"generation": number, "workers": []}),
            FormGeneration(number, tuple((node.name, node.nproc) for node in nodes), planned.failed_at),
        ]
        return Generation(number, tuple(node.name for node in nodes)), commands
