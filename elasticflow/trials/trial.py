"""Trials: short runs of a job in scratch folders, and the acts done to each; the jobs that can be tried.

A trial is the job with few changes: one node with a given number of workers, snapshots in the scratch folder only, and
one more restart. The job's length stays, so a schedule that uses it is the same: the trial is asked to exit after some
steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elasticflow.compiler.provenance.origins import own_sources
from elasticflow.errors import TrialRefusedError
from elasticflow.jobfile.tables.launching import NodesTable, TorchrunTable
from elasticflow.jobfile.tables.parallel import ParallelTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.faults import FaultPlan

FEWEST_STEPS = 6
"""Fewer leave no room for a kill, a drain and an end."""

# Snapshots are taken only when a launch exits.
_NEVER = "999999999 steps"
# Steps between the snapshots of a disturbed trial.
_SNAPSHOTS = 10
# A stopped worker is noticed within this time.
_HANG = "30 s"
# A drain takes one more step; no deadline of a machine limits it.
_GRACE = "1 h"


@dataclass(frozen=True)
class TrialAct:
    """An act on a run while it is held.

    Attributes:
        step: Finished steps at which the run is held.
        what: `kill`: kill -9 of the last rank. `drain`: SIGTERM to the launch, which exits after one more step.
            `faults`: the faults of the trial's plan that are due at the step.
    """

    step: int
    what: Literal["kill", "drain", "faults"]


class World(NamedTuple):
    """The workers of each node, and how many of them hold one copy of the model; None: as the job has it."""

    workers: int
    shard: int | None = None

    def __str__(self) -> str:
        """Return `4`, or `4/2` with two workers to a copy."""
        return f"{self.workers}" if self.shard is None else f"{self.workers}/{self.shard}"


@dataclass(frozen=True)
class TrialLaunch:
    """One launch of a trial: its world, and the acts in order."""

    world: World
    acts: tuple[TrialAct, ...]


@dataclass(frozen=True)
class Trial:
    """One short run of the job.

    Attributes:
        name: Name of its run folder, unique within a verification.
        snapshot_every: Steps between its snapshots; None: a snapshot only when it exits.
        killed_after: Step after which a worker is killed; None: no worker is killed.
        drained_after: Step after which the first launch is drained and a second launch continues; None: there is one
            launch.
    """

    name: str
    launches: tuple[TrialLaunch, ...]
    steps: int
    snapshot_every: int | None = None
    killed_after: int | None = None
    drained_after: int | None = None
    plan: FaultPlan | None = None

    @property
    def worlds(self) -> tuple[World, ...]:
        """World of each launch."""
        return tuple(launch.world for launch in self.launches)


def worlds_of(worlds: Sequence[int], shards: Sequence[int]) -> tuple[World, ...]:
    """Return each world size with each of *shards* that divides the size; without *shards*, the sizes alone.

    Raises:
        TrialRefusedError: a degree divides none of the world sizes, or none divides one of them.
    """
    made = [World(size, shard) for size in worlds for shard in shards if size % shard == 0]
    for shard in shards:
        if all(world.shard != shard for world in made):
            sizes = " or ".join(map(str, worlds))
            raise TrialRefusedError(f"--shards {shard} does not divide {sizes} workers", "leave it out")
    for size in worlds if shards else ():
        if all(world.workers != size for world in made):
            degrees = " or ".join(map(str, shards))
            remedy = "leave this world size out, or add --shards 1"
            raise TrialRefusedError(f"{size} workers are no multiple of --shards {degrees}", remedy)
    return tuple(made) or tuple(map(World, worlds))


def undisturbed(number: int, world: World, steps: int) -> Trial:
    """Return a trial without disturbance, which is only asked to exit in the end."""
    end = TrialLaunch(world, (TrialAct(steps - 1, "drain"),))
    return Trial(f"{number}-workers-{_in_name(world)}", (end,), steps)


def disturbed(number: int, first: World, second: World, steps: int) -> Trial:
    """Return a trial with a kill at about a third of its steps, and a resize at about two thirds.

    The kill comes when the most steps have passed since the last snapshot: these are redone.
    """
    every = max(1, steps // _SNAPSHOTS)
    kill, drain = steps // 3 // every * every, 2 * steps // 3
    acts = TrialAct(kill, "kill"), TrialAct(drain - 1, "drain")
    launches = TrialLaunch(first, acts), TrialLaunch(second, (TrialAct(steps - 1, "drain"),))
    name = f"{number}-disturbed-{_in_name(first)}-{_in_name(second)}"
    return Trial(name, launches, steps, every, killed_after=kill, drained_after=drain)


def restarted(number: int, world: World, steps: int) -> Trial:
    """Return a trial with a kill and a drain, each followed by a restart with the same number of workers."""
    same = disturbed(number, world, world, steps)
    return replace(same, name=f"{number}-restarted-{_in_name(world)}")


def _in_name(world: World) -> str:
    return str(world).replace("/", "x")


def count(worlds: Sequence[World]) -> int:
    """Return the number of trials that verify a job at *worlds*: one at each, a restart, and a resize if they differ."""
    return len(worlds) + 1 + (worlds[-1] != worlds[0])


def with_faults(number: int, workers: int, steps: int, plan: FaultPlan) -> Trial:
    """Return a trial with the faults of *plan*, on nodes with *workers* workers each."""
    acts = [TrialAct(step, "faults") for step in sorted({fault.step for fault in plan.faults})]
    launch = TrialLaunch(World(workers), (*acts, TrialAct(steps - 1, "drain")))
    return Trial(f"{number}-chaos", (launch,), steps, max(1, steps // _SNAPSHOTS), plan=plan)


def job_of(trial: Trial, launch: TrialLaunch, job: Job) -> Job:
    """Return *job* changed for *launch* of the trial; all its files are in the scratch folder."""
    every = _NEVER if trial.snapshot_every is None else f"{trial.snapshot_every} steps"
    snapshots: dict[str, Any] = {"uri": None, "options": {}, "every": every, "grace": _GRACE}
    if trial.snapshot_every is None:
        snapshots["memory"] = "off"
    given: dict[str, Any] = {"nproc_per_node": launch.world.workers, "device": job.nodes.device_of_workers}
    nodes = NodesTable(**given)
    restarts: dict[str, Any] = {"budget": max(1, job.restarts.budget)}
    if trial.plan is not None:
        nodes = NodesTable(min=trial.plan.least_nodes, max=trial.plan.most_nodes, **given)
        restarts |= {"budget": 2 * len(trial.plan.faults) + 1, "hang_timeout": _HANG}
    parallel = job.parallel if job.script is None else None
    if launch.world.shard is not None:
        parallel = (parallel or ParallelTable(shard=1)).model_copy(update={"shard": launch.world.shard})
    return job.model_copy(
        update={
            "nodes": nodes,
            "parallel": parallel,
            "restarts": job.restarts.model_copy(update=restarts),
            "snapshots": job.snapshots.model_copy(update=snapshots),
            "torchrun": TorchrunTable(
                start_method=job.torchrun.start_method, numa_binding=job.torchrun.numa_binding
            ),
        }
    )


def check(job: Job, worlds: Sequence[World], steps: int, gpus: int) -> int:
    """Check that the job can be tried, and return the number of steps of each trial.

    Raises:
        TrialRefusedError: the job cannot be tried at each of *worlds* on this machine; has reason and remedy.
    """
    largest = max(world.workers for world in worlds)
    if job.nodes.device_of_workers != "cpu" and 0 < gpus < largest:
        raise TrialRefusedError(
            f"this machine has GPUs for {gpus} of {largest} workers, each of which needs one",
            f"leave out world sizes above {gpus}, or compare on the CPU: --set nodes.device=cpu",
        )
    if job.script is not None and any(world.shard is not None for world in worlds):
        raise TrialRefusedError("a script shards its model itself", "leave --shards out")
    if job.script is None:
        _check_shares(job, largest)
        _check_shards(job, worlds)
        steps = min(steps, job.train.steps or steps)
    check_length(steps)
    return steps


def _check_shares(job: Job, largest: int) -> None:
    batch, shards = job.dataset.global_batch_size, job.train.virtual_shards
    if shards is not None and largest > shards:
        raise TrialRefusedError(
            f"{largest} workers cannot share {shards} virtual shards (train.virtual_shards)",
            f"leave out world sizes above {shards}, or: --set train.virtual_shards=N",
        )
    if largest > batch:
        raise TrialRefusedError(
            f"{largest} workers cannot share a batch of {batch} (dataset.global_batch_size)",
            f"leave out world sizes above {batch}",
        )


def _check_shards(job: Job, worlds: Sequence[World]) -> None:
    shard = None if job.parallel is None else job.parallel.shard
    for world in worlds:
        if world.shard is None and isinstance(shard, int) and world.workers % shard:
            raise TrialRefusedError(
                f"{world.workers} workers are no multiple of {shard} (parallel.shard)",
                f"leave out this world size, or say --shards 1,{shard}",
            )


def check_length(steps: int) -> None:
    """Check that a trial of *steps* steps has room for its disturbances.

    Raises:
        TrialRefusedError: the steps are too few.
    """
    if steps < FEWEST_STEPS:
        raise TrialRefusedError(
            f"{steps} steps are too few for a kill, a resize and an end",
            f"{FEWEST_STEPS} are the fewest: raise --steps, or make the job longer with --set train.steps=N",
        )


_CALLS = "its loop needs run.keep, run.batches and run.step: elasticflow guide own-loop"
# A module that is imported by a name made at run time, as hydra does, or from a folder put on the path, may join.
_MAY_JOIN = re.compile(
    rb"\b(?:elasticflow|importlib|__import__|runpy|pkgutil|exec|hydra|jsonargparse|sys\.path)\b"
)


def require_own_loop(job: Job, root: Path) -> None:
    """Check that a job's script, if it has one, may use elasticflow: modules of the project that it imports count, too.

    Raises:
        TrialRefusedError: neither the script nor a module of the project that it imports can call `elasticflow.join`.
    """
    if job.script is None:
        return
    files = [root / name for name in own_sources(job, root, ())]
    if files and not any(_MAY_JOIN.search(file.read_bytes()) for file in files):
        script = job.script.entry or job.script.module or ""
        raise TrialRefusedError(
            f"neither {script} nor a module of the project that it imports uses elasticflow.join: when a step ends, and what it makes of "
            "the weights, is not known",
            f"{_CALLS}; where an installed package has the loop, import elasticflow in the script, too",
        )


def nothing_to_try(script: str) -> TrialRefusedError:
    """Return the refusal of a script that reports no steps."""
    return TrialRefusedError(
        f"{script} does not train by elasticflow.join: when a step of it ends, and what it makes of the weights, is not known",
        _CALLS,
    )
