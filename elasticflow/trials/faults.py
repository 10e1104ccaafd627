"""Faults of a run: plans of them, read from TOML or drawn from a seed, and the actor that does them to a launch.

A plan gives the number of simulated nodes at the start (`nodes`, default 1), and has a table `[[faults]]` for each
fault: `step` (finished steps when it is done), `what` (a key of KINDS), and the rank or node that it hits.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import psutil

from elasticflow.errors import FaultPlanError
from elasticflow.jobfile.diagnostics import positions
from elasticflow.jobfile.text.read import UnreadableError, parse_toml, read_text
from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.observe.run_state import RunningWorker
    from elasticflow.run_folder import RunFolder

MOST_FAULTS = 1000


class FaultKind(NamedTuple):
    """A kind of fault.

    Attributes:
        words: The fault in words; `{target}` stands for the rank or the node.
        target: Key of the plan that names the target: `rank`, `node`, `point`; None: the fault has no target.
        point: Fault points and acts that do the fault inside the processes of the run.
        nodes: Number of nodes that the fault adds to the run.
    """

    words: str
    target: str | None = None
    point: str | None = None
    nodes: int = 0


KINDS: dict[str, FaultKind] = {
    "kill": FaultKind("kill -9 of rank {target}", "rank"),
    "stop": FaultKind("SIGSTOP of rank {target}", "rank"),
    "terminate": FaultKind("SIGTERM to rank {target}", "rank"),
    "raise": FaultKind("an exception on rank {target}", "rank", "training.step=raise:EREMOTE"),
    "flip": FaultKind("a bit of a parameter flipped on rank {target}", "rank", "training.step=flip"),
    "kill-agent": FaultKind("kill -9 of the agent of node {target}", "node"),
    "join": FaultKind("a node joins", nodes=1),
    "leave": FaultKind("a node leaves", nodes=-1),
    "kill-node": FaultKind("a node is lost", nodes=-1),
    "corrupt-snapshot": FaultKind("newest snapshot corrupted, rank {target} killed", "rank"),
    "truncate-snapshot": FaultKind("newest snapshot cut short, rank {target} killed", "rank"),
    "full-disk": FaultKind("a write fails: no space left", point="shares.before_write=raise:ENOSPC"),
    "slow-store": FaultKind("a write takes 2 s longer", point="shares.before_write=stall:2"),
    "at-point": FaultKind("{target}", "point"),
}
"""Kinds of faults by their names in a plan."""

_DRAWN = ("kill", "terminate", "raise", "flip", "kill-agent", "corrupt-snapshot", "truncate-snapshot", "full-disk", "slow-store")  # fmt: skip
_KEYS = ("step", "what", "rank", "node", "point", "act")


@dataclass(frozen=True)
class Fault:
    """A fault of a plan.

    Attributes:
        step: Finished steps when the fault is done.
        what: A key of KINDS.
        rank: Rank of the worker to hit; None: the last rank.
        node: Number of the node to hit, from 0.
        point: For `at-point`: a key of `fault_injection.POINTS`.
        act: For `at-point`: the action on the process that first reaches the point.
    """

    step: int
    what: str
    rank: int | None = None
    node: int = 0
    point: str | None = None
    act: str | None = None

    @property
    def clause(self) -> str | None:
        """Its clause of ELASTICFLOW_FAULTS, without the cue; None: the fault is done from outside."""
        if self.what == "at-point":
            return f"{self.point}={self.act}"
        return KINDS[self.what].point

    def words(self, rank: int) -> str:
        """Return the fault in words; *rank* is the rank that it hit."""
        target = {"rank": rank, "node": self.node, "point": f"{self.act} at {self.point}"}
        kind = KINDS[self.what]
        return kind.words.format(target=target.get(kind.target or "rank"))


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a run, in order.

    Attributes:
        name: File name, or the seed it was drawn from.
    """

    name: str
    faults: tuple[Fault, ...]
    nodes: int = 1

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes."""
        return max(self._counts())

    @property
    def least_nodes(self) -> int:
        """Smallest number of nodes."""
        return min(self._counts())

    def _counts(self) -> list[int]:
        counts = [self.nodes]
        for fault in self.faults:
            counts.append(counts[-1] + KINDS[fault.what].nodes)
        return counts


def read_plan(path: Path, steps: int) -> FaultPlan:
    """Return the plan in the file at *path*, for a run of *steps* steps.

    Raises:
        FaultPlanError: the file is no plan, or the plan cannot be done in *steps* steps; has place and remedy.
    """
    try:
        text = read_text(path, str(path))
        raw = parse_toml(text, str(path))
    except UnreadableError as error:
        problem = error.diagnostic
        place = "" if problem.line is None else f"{path}:{problem.line}:{problem.column}: "
        remedy = (
            problem.help or "name a TOML file, such as those in examples/faults, or a number of random faults"
        )
        raise FaultPlanError(f"{place}{problem.message}", remedy) from error
    return _Reader(str(path), text, raw).plan(steps)


class _Reader:
    """Reads a plan, and reports mistakes with their places."""

    def __init__(self, file: str, text: str, raw: dict[str, Any]) -> None:
        self._file, self._text, self._raw = file, text, raw
        self._spots = positions.spots_in(text)

    def plan(self, steps: int) -> FaultPlan:
        for key in self._raw:
            if key not in ("nodes", "faults"):
                self._refuse((key,), f"`{key}` is no key of a fault plan", "it has `nodes` and [[faults]]")
        nodes = self._number((), "nodes", 1, 64, 1)
        rows = self._raw.get("faults", [])
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            self._refuse(("faults",), "a plan has at least one [[faults]]", "add one with `step` and `what`")
        if len(rows) > MOST_FAULTS:
            self._refuse(("faults",), f"{len(rows)} faults are more than {MOST_FAULTS}")
        read = [self._fault(number, row, steps) for number, row in enumerate(rows)]
        plan = FaultPlan(self._file, tuple(sorted(read, key=lambda fault: fault.step)), nodes)
        if plan.least_nodes < 1:
            self._refuse(("faults",), "no node is left", "raise `nodes`, or have one join before")
        return plan

    def _fault(self, number: int, row: dict[str, Any], steps: int) -> Fault:
        at: KeyPath = ("faults", number)
        for key in row:
            if key not in _KEYS:
                self._refuse((*at, key), f"`{key}` is no key of a fault", f"it has {', '.join(_KEYS)}")
        what = row.get("what")
        if not isinstance(what, str) or what not in KINDS:
            remedy = f"there are {', '.join(KINDS)}"
            self._refuse((*at, "what"), f"`what` is {what!r}, which is no fault", remedy)
        if "step" not in row:
            self._refuse((*at, "step"), "`step` is missing", "say after how many finished steps it is done")
        wanted = KINDS[what].target
        for key in ("rank", "node", "point", "act"):
            if key in row and key != wanted and not (key == "act" and wanted == "point"):
                self._refuse((*at, key), f'"{what}" has no `{key}`', "take it out")
        return Fault(
            step=self._number(at, "step", 1, steps - 2),
            what=what,
            rank=self._number(at, "rank", 0, 10**6) if "rank" in row else None,
            node=self._number(at, "node", 0, 64, 0),
            point=self._text_of(at, row, "point") if wanted == "point" else None,
            act=self._text_of(at, row, "act") if wanted == "point" else None,
        )

    def _text_of(self, at: KeyPath, row: dict[str, Any], key: str) -> str:
        value = str(row.get(key, ""))
        if key == "point" and value not in fault_injection.POINTS:
            remedy = f"there are {', '.join(sorted(fault_injection.POINTS))}"
            self._refuse((*at, key), f"`point` is {value!r}, which is no fault point", remedy)
        if key == "act" and not fault_injection.is_act(value):
            self._refuse(
                (*at, key), f"`act` is {value!r}", "there are kill, stop, flip, stall:SECONDS and raise:ERRNO"
            )
        return value

    def _number(self, at: KeyPath, key: str, low: int, high: int, default: int | None = None) -> int:
        row: Any = self._raw
        for part in at:
            row = row[part]
        value = row.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            is_late = key == "step" and isinstance(value, int) and value > high
            remedy = "raise --steps, or do it earlier" if is_late else None
            reason = f"`{key}` is {value!r}: must be a whole number from {low} to {high}"
            self._refuse((*at, key), reason, remedy)
        return value

    def _refuse(self, path: KeyPath, reason: str, remedy: str | None = None) -> NoReturn:
        spot = self._spots.get(path) or self._spots.get(path[:-1])
        span = None if spot is None else spot.key or spot.value
        where = "" if span is None else ":{}:{}".format(*positions.line_and_column(self._text, span.start))
        raise FaultPlanError(f"{self._file}{where}: {reason}", remedy)


def draw_plan(count: int, seed: int, steps: int, world_size: int) -> FaultPlan:
    """Return *count* faults drawn from *seed* and spread over the steps of the run; equal arguments give equal faults."""
    random_numbers = random.Random(seed)
    fault_steps = sorted(random_numbers.randint(1, steps - 2) for _ in range(count))
    # A flipped bit shows only by comparison with another replica.
    kinds = [kind for kind in _DRAWN if world_size > 1 or kind != "flip"]
    faults = []
    for step in fault_steps:
        what = random_numbers.choice(kinds)
        rank = random_numbers.randrange(world_size) if KINDS[what].target == "rank" else None
        faults.append(Fault(step, what, rank))
    return FaultPlan(f"{count} faults drawn from seed {seed}", tuple(faults))


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(frozen=True)
class DoneFault:
    """A fault that was done, the rank that it hit, and its Unix time."""

    fault: Fault
    rank: int
    at: float


def fault_variable(plan: FaultPlan, folder: Path) -> str:
    """Return the value of ELASTICFLOW_FAULTS for a run of *plan*; each fault inside a process waits for its cue file."""
    clauses = []
    for number, fault in enumerate(plan.faults):
        if fault.clause is not None:
            whom = "" if fault.rank is None else f" rank={fault.rank}"
            clauses.append(f"{fault.clause}{whom} cue={cue(folder, number)}")
    return ", ".join(clauses)


def scale(plan: FaultPlan, folder: Path) -> tuple[ScaleChange, ...]:
    """Return the changes of the number of nodes, each on its cue file."""
    changes = [ScaleChange(0.0, plan.nodes)]
    for number, fault in enumerate(plan.faults):
        if KINDS[fault.what].nodes:
            nodes = changes[-1].nodes + KINDS[fault.what].nodes
            changes.append(ScaleChange(0.0, nodes, fault.what == "kill-node", cue(folder, number)))
    return tuple(changes)


def cue(folder: Path, number: int) -> Path:
    """Return the cue file of the plan's fault *number*: the fault happens once the file exists."""
    return folder / f"cue-{number}"


class FaultActor:
    """Does faults to a running launch."""

    def __init__(self, run: RunFolder, launch: int, workers: Sequence[RunningWorker], folder: Path) -> None:
        self._run, self._launch, self._folder = run, launch, folder
        self._workers = sorted(workers, key=lambda worker: worker.rank)

    def do_all(self, plan: FaultPlan, step: int) -> list[DoneFault]:
        """Do the faults of *plan* that are due after *step*."""
        done = []
        for number, fault in enumerate(plan.faults):
            if fault.step == step:
                at = time.time()
                done.append(DoneFault(fault, self._do(number, fault), at))
        return done

    def _do(self, number: int, fault: Fault) -> int:
        if fault.clause is not None or KINDS[fault.what].nodes:
            cue(self._folder, number).touch()
            return self._worker(fault.rank).rank if fault.rank is None else fault.rank
        worker = self._worker(fault.rank)
        if fault.what == "kill-agent":
            on_node = [worker for worker in self._workers if worker.node == f"n{fault.node}"]
            self._kill_agent_of((on_node or [worker])[0])
        elif fault.what in _SIGNALS:
            _signal(worker, _SIGNALS[fault.what])
        else:
            self._damage(cuts=fault.what == "truncate-snapshot")
            _signal(worker, signal.SIGKILL)
        return worker.rank

    def _worker(self, rank: int | None) -> RunningWorker:
        """Return the worker of *rank*, or the last worker if there is no such rank."""
        return next((worker for worker in self._workers if worker.rank == rank), self._workers[-1])

    def _kill_agent_of(self, worker: RunningWorker) -> None:
        """Kill the process between the launch and *worker* that is the launch's own child."""
        if worker.process is None or not worker.process.is_alive:
            return
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(worker.pid)
            for parent in agent.parents():
                if parent.pid == self._launch:
                    agent.kill()
                    return
                agent = parent

    def _damage(self, *, cuts: bool) -> None:
        catalog = Catalog(Storage(str(self._run.path)))
        newest = catalog.newest()
        if newest is None:
            return
        name = next(iter(newest.files))
        path = self._run.path / catalog.folder() / newest.location(name)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if cuts else data)


def _signal(worker: RunningWorker, number: signal.Signals) -> None:
    if worker.process is not None:  # a worker that an earlier fault has ended gets no signal
        worker.process.send(number)
