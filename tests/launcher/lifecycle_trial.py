"""A lifecycle whose clock, nodes and generation numbers are the test's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.plan.launch_plan import RestartPlan
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.restarts.restart_ledger import RestartLedger
from elasticflow.launcher.restarts.restart_policy import RestartPolicy
from elasticflow.launcher.restarts.restarts import Restarts
from elasticflow.launcher.restarts.snapshot_rollback import SnapshotRollback
from elasticflow.launcher.supervisor.formation import Formation
from elasticflow.launcher.supervisor.lifecycle import Lifecycle
from elasticflow.launcher.supervisor.nodes import Node, Nodes
from elasticflow.protocol.messages import WorkerEnd, WorkersEnded
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from elasticflow.protocol.messages import RefusedModule
    from elasticflow.run_folder import RunFolder

GRACE_S = 30.0


class FakeAgents:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.formed: list[tuple[int, tuple[str, ...], float | None]] = []
        self.requests: list[tuple[str, int]] = []
        self.released: list[str] = []

    def form(self, generation: int, nodes: tuple[tuple[str, int], ...], failed_at: float | None) -> None:
        """Note a generation to form."""
        self.formed.append((generation, tuple(node for node, _ in nodes), failed_at))

    def request(self, what: str, generation: int) -> None:
        """Note a request."""
        self.requests.append((what, generation))

    def release(self, node: str) -> None:
        """Note a node that was let go."""
        self.released.append(node)


@dataclass
class Trial:
    """A lifecycle whose clock, nodes and generation numbers are the test's."""

    folder: RunFolder
    budget: int = 2
    least: int = 1
    most: int = 1
    agents: FakeAgents = field(default_factory=FakeAgents)
    records: list[dict[str, Any]] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    clock: float = 1000.0

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder, 1, self.records.append)
        self.catalog = Catalog(Storage(str(self.folder.path)))
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
        ledger = RestartLedger(self.folder.ledger)
        rollback = SnapshotRollback(self.catalog, self.journal)
        restarts = Restarts(self.journal, RestartPolicy(plan), ledger, rollback)
        self.nodes = Nodes(self.least, self.most)
        formation = Formation(self.journal, self.nodes, self.agents, self.claimed_number, "start")
        self.lifecycle = Lifecycle(self.journal, restarts, self.agents, self.nodes, formation, GRACE_S)

    def claimed_number(self, reason: str, last: int, nodes: tuple[str, ...]) -> int | None:
        """Return the next generation number, by the test's own claim if it has one."""
        return self.claim(reason, last)

    def claim(self, reason: str, last: int) -> int | None:
        """Return the next generation number."""
        self.claimed.append(reason)
        return len(self.claimed)

    def begin(self) -> None:
        """Have the node join and the first generation formed."""
        self.join()
        self.lifecycle.time_passed()

    def join(self, node: str = "n0", *, refused: tuple[RefusedModule, ...] = ()) -> None:
        """Say that a node is ready."""
        self.lifecycle.node_joined(Node(node, "host", 2), refused)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock += seconds
        self.lifecycle.time_passed()

    def step(self, step: int, *, finished: bool = False) -> None:
        """Have the generation finish a step."""
        generation = self.lifecycle.generation
        assert generation is not None
        generation.step, generation.epoch, generation.is_finished = step, 0, finished
        self.journal.update(step=step)

    def leave(self, node: str = "n0") -> None:
        """Have all workers of a node leave with code 0."""
        assert self.lifecycle.generation is not None
        number = self.lifecycle.generation.number
        workers = (worker(0, 0), worker(1, 0))
        self.lifecycle.group_ended(WorkersEnded(number, node, failed=False, workers=workers))

    def killed(self, node: str) -> None:
        """Have a node's agent say that it killed its workers."""
        assert self.lifecycle.generation is not None
        number = self.lifecycle.generation.number
        workers = (worker(2, -9, ended_by_us=True), worker(3, -9, ended_by_us=True))
        self.lifecycle.group_ended(WorkersEnded(number, node, failed=False, workers=workers))

    def fail(self, *workers: WorkerEnd, generation: int | None = None, node: str = "n0") -> None:
        """Have the workers fail: by default rank 1 killed, rank 0 ended by the agent."""
        if generation is None:
            assert self.lifecycle.generation is not None
            generation = self.lifecycle.generation.number
        ends = workers or (worker(0, -9, ended_by_us=True), worker(1, -9))
        self.lifecycle.group_ended(WorkersEnded(generation, node, failed=True, workers=ends))

    def names(self) -> list[str]:
        """Return the names of the events so far."""
        return [record["event"] for record in self.records]

    def verdict(self) -> tuple[str, int]:
        """Return status and exit code."""
        assert self.lifecycle.verdict is not None
        return self.lifecycle.verdict.status, self.lifecycle.verdict.exit_code


def worker(rank: int, code: int, *, ended_by_us: bool = False, stderr: str = "") -> WorkerEnd:
    """Return how one worker ended, as an agent tells it."""
    return WorkerEnd(
        rank=rank,
        pid=100 + rank,
        exit_code=code,
        at=5.0 + rank,
        ended_by_us=ended_by_us,
        oom_killed=False,
        stderr=stderr,
    )
