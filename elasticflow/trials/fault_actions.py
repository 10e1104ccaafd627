"""Does the faults of a plan to a launch that is held for them."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.trials.fault_plan import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.observe.run_state import RunningWorker
    from elasticflow.run_folder import RunFolder
    from elasticflow.trials.fault_plan import Fault, FaultPlan

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(frozen=True)
class DoneFault:
    """A fault that was done, the rank that it hit, and its Unix time."""

    fault: Fault
    rank: int
    at: float


def fault_variable(plan: FaultPlan, folder: Path) -> str:
    """Return the value of ELASTICFLOW_FAULTS for a run of *plan*; each fault inside of a process waits for its cue file."""
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
        """Do one fault and return the rank that it hits."""
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
