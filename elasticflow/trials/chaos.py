"""Compares a job's training with and without faults, and measures the cost of each fault."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow.errors import TrialRefusedError
from elasticflow.observe.history import RunHistory
from elasticflow.trials import compare_runs, trial
from elasticflow.trials.child import TrialRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from elasticflow.protocol.trajectory_record import Record
    from elasticflow.run_folder import RunFolder
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.compare_runs import RunComparison
    from elasticflow.trials.faults import DoneFault, Fault, FaultPlan
    from elasticflow.trials.trial import Trial


@dataclass(frozen=True)
class FaultCost:
    """Consequences of a fault, up to the next fault.

    Attributes:
        restarts: Class of each generation that ended.
        seconds: Seconds from the fault, or from the drain it led to, to the first finished step of the next generation;
            None if no generation ended.
        snapshots: Snapshots that were set aside, or could not be written.
    """

    fault: Fault
    words: str
    restarts: tuple[str, ...]
    seconds: float | None
    redone: int
    snapshots: int = 0


@dataclass(frozen=True)
class ChaosOutcome:
    """Comparison of the disturbed run with the undisturbed run.

    Attributes:
        is_exact: True: every bit was compared; False: the samples of each step and the smoothed loss.
        seconds: Durations of the undisturbed and the disturbed run.
        undone: Number of faults that were not done because the run had ended before.
    """

    is_exact: bool
    run: RunFolder
    steps: int
    seconds: tuple[float, float]
    comparison: RunComparison
    costs: tuple[FaultCost, ...]
    undone: int


def run_with_faults(
    subject: TriedJob,
    plan: FaultPlan,
    workers: int,
    steps: int,
    tolerance: float,
    scratch: Path,
    begin: Callable[[Trial], Callable[[int], None]],
) -> ChaosOutcome:
    """Run the job undisturbed, then with the faults of *plan*, and compare.

    Args:
        subject: The job; its own runs and snapshots are left alone.
        tolerance: Tolerance of `compare_losses`.
        begin: Called with each trial before it starts; returns a function that is called with its steps so far.

    Raises:
        TrialFailedError: one of the runs failed.
        TrialRefusedError: the job is too short, or so short that it ends before the first fault, or the path of *scratch* has blanks.
    """
    _check_scratch(scratch)
    mark = secrets.token_hex(2)
    began = time.monotonic()
    calm = trial.undisturbed(1, trial.World(workers * plan.nodes), steps)
    calm_run = TrialRun(calm, subject, scratch, mark)
    reference = calm_run.play(begin(calm))
    length = max(record.step for record in reference)
    if length < steps:
        trial.check_length(length)
        plan = without_late_faults(plan, length)
    between = time.monotonic()
    wild = trial.with_faults(2, workers, length, plan)
    trial_run = TrialRun(wild, subject, scratch, mark)
    records = trial_run.play(begin(wild))
    is_exact = calm_run.is_exact
    return ChaosOutcome(
        is_exact=is_exact,
        run=trial_run.run,
        steps=max(record.step for record in records),
        seconds=(between - began, time.monotonic() - between),
        comparison=_compared(reference, records, tolerance, is_exact=is_exact),
        costs=costs(trial_run.done, RunHistory.read(trial_run.run), records),
        undone=len(plan.faults) - len(trial_run.done),
    )


def without_late_faults(plan: FaultPlan, length: int) -> FaultPlan:
    """Return *plan* without the faults that a run of *length* steps does not reach.

    Raises:
        TrialRefusedError: no fault is left.
    """
    faults = tuple(fault for fault in plan.faults if fault.step <= length - 2)
    if not faults:
        raise TrialRefusedError(
            f"the job ends after {length} steps, before the first fault of the plan",
            f"--steps {length}, or make the job longer with --set train.steps=N",
        )
    return replace(plan, faults=faults)


def _check_scratch(folder: Path) -> None:
    """Check that cues in *folder* can be named in a list of clauses."""
    if re.search(r"[\s,]", str(folder)):
        raise TrialRefusedError(
            f"the scratch folder's path has a blank or a comma: {folder}",
            "choose another with --keep or TMPDIR",
        )


def _compared(
    reference: Sequence[Record], records: Sequence[Record], tolerance: float, *, is_exact: bool
) -> RunComparison:
    if not is_exact:
        return compare_runs.compare_losses(reference, records, tolerance)
    comparison = compare_runs.compare_bits(reference, compare_runs.without_lost_steps(records))
    return replace(comparison, redone=compare_runs.redone(records))


def costs(done: Sequence[DoneFault], history: RunHistory, records: Sequence[Record]) -> tuple[FaultCost, ...]:
    """Return the consequences of each fault: all that happened before the next fault, except the run's own end."""
    redone = _redone_by_next(records)
    ends = [*(fault.at for fault in done[1:]), math.inf][: len(done)]
    return tuple(_cost(fault, end, history, redone) for fault, end in zip(done, ends, strict=True))


def _redone_by_next(records: Sequence[Record]) -> dict[int, int]:
    """Return, for each generation, the number of its steps that the next generation did again."""
    begun = {record.generation: record.step for record in records if record.loss is None}
    last = {record.generation: record.step for record in records}
    return {
        number: max(0, last[number] - begun[after]) for number, after in itertools.pairwise(sorted(begun))
    }


def _cost(done: DoneFault, end: float, history: RunHistory, redone: Mapping[int, int]) -> FaultCost:
    def within(times: Iterable[float | None]) -> list[float]:
        return [at for at in times if at is not None and done.at <= at < end]

    generations = history.generations.values()
    stops = [generation.stop for generation in generations if generation.stop is not None][:-1]
    stops = [stop for stop in stops if within([stop.at])]
    seconds = None
    if stops:
        [stopped_at, *_] = within(stop.at for stop in stops)
        resumed = [at for at in within(g.first_step_at for g in generations) if at >= stopped_at]
        # Before a drain a node was still joining, and no time was lost.
        drained = [at for at in within(g.drain_at for g in generations) if at <= stopped_at]
        seconds = round(max(resumed) - max(drained, default=done.at), 3) if resumed else None
    return FaultCost(
        fault=done.fault,
        words=done.fault.words(done.rank),
        restarts=tuple(stop.kind for stop in stops),
        seconds=seconds,
        redone=sum(redone.get(stop.generation, 0) for stop in stops),
        snapshots=len(within(s.at for s in history.snapshots if s.state != "committed")),
    )
