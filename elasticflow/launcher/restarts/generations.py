"""What the supervisor knows of the generation that runs now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.launcher.restarts.failures import Failure, Report, first_failure

if TYPE_CHECKING:
    from elasticflow.events import EventRecord
    from elasticflow.protocol.messages import StalledWorker, StartedWorker, WorkerEnd


@dataclass(frozen=True)
class Cause:
    """Why a generation failed.

    Attributes:
        node: Where.
        kind: A class of `failure_classes.CLASSES`.
        error: In one line.
        failure: The worker that failed first; None if it was a whole node.
    """

    node: str
    kind: str
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
        stalled: Nodes whose workers have all made no progress for too long.
        stacks: Where the workers of each node stand that has said so, once it was asked.
        stacks_asked: When it was, on the monotonic clock.
        hung: In the form of a `worker.raised` line, what the rank was doing that all others wait for.
        workers: Rank, process and node of each worker, by node.
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
    stalled: set[str] = field(default_factory=set)
    stacks: dict[str, tuple[StalledWorker, ...]] = field(default_factory=dict)
    stacks_asked: float | None = None
    hung: dict[int, EventRecord] = field(default_factory=dict)
    workers: dict[str, tuple[StartedWorker, ...]] = field(default_factory=dict)
    ended: dict[str, tuple[WorkerEnd, ...]] = field(default_factory=dict)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no worker of any node is left."""
        return not self.running

    @property
    def running(self) -> tuple[str, ...]:
        """Its nodes that have neither told how their workers ended nor are lost."""
        return tuple(node for node in self.nodes if node not in self.ended and node not in self.lost)

    @property
    def failed_at(self) -> float | None:
        """Unix time of the first end of a worker, as far as nodes have told."""
        return min((end.at for ends in self.ended.values() for end in ends), default=None)

    def cause(self) -> Cause | None:
        """Return why it failed: a lost node, else the worker that failed first; None if no worker failed by itself."""
        for node, (kind, error) in self.lost.items():
            return Cause(node, kind, error)
        reports = [self._report(node, end) for node, ends in self.ended.items() for end in ends]
        found = first_failure(reports, is_finished=self.is_finished)
        return None if found is None else Cause(found.node, found.failure_class, found.error, found)

    def _report(self, node: str, end: WorkerEnd) -> Report:
        is_hung = end.rank in self.hung
        return Report(
            rank=end.rank,
            exit_code=end.exit_code,
            raised=self.hung.get(end.rank) or self.raised.get(end.rank),
            time=end.at,
            node=node,
            pid=end.pid,
            ended_by_us=end.ended_by_us and not is_hung,
            oom_killed=end.oom_killed,
            stderr=end.stderr,
        )
