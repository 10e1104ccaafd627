"""What the supervisor knows of the generation that runs now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elasticflow.launcher.restarts.failures import Failure, Report, first_failure


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
        standing: Nodes whose workers have all stood still for too long.
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
    raised: dict[int, dict[str, Any]] = field(default_factory=dict)
    standing: set[str] = field(default_factory=set)
    stacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stacks_asked: float | None = None
    hung: dict[int, dict[str, Any]] = field(default_factory=dict)
    workers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        return min((w["at"] for m in self.ended.values() for w in m["workers"]), default=None)

    def cause(self) -> Cause | None:
        """Return why it failed: a lost node, else the worker that failed first; None if no worker failed by itself."""
        for node, (kind, error) in self.lost.items():
            return Cause(node, kind, error)
        reports = [r for node, message in self.ended.items() for r in self._reports(node, message["workers"])]
        found = first_failure(reports, is_finished=self.is_finished)
        return None if found is None else Cause(found.node, found.failure_class, found.error, found)

    def _reports(self, node: str, workers: list[dict[str, Any]]) -> list[Report]:
        return [
            Report(
                rank=w["rank"],
                exit_code=w["exit_code"],
                raised=self.hung.get(w["rank"]) or self.raised.get(w["rank"]),
                time=w["at"],
                node=node,
                pid=w["pid"],
                ended_by_us=w["ended_by_us"] and w["rank"] not in self.hung,
                oom_killed=w["oom_killed"],
                stderr=w["stderr"],
            )
            for w in workers
        ]
