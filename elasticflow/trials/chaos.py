"""Whether a job trains the same with faults on cue as without, and what each fault cost."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow.errors import TrialRefusedError
from elasticflow.observe.history import History
from elasticflow.trials import compare_runs, trial
from elasticflow.trials.child import TrialRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from elasticflow.protocol.trajectory_record import Record
    from elasticflow.run_folder import RunFolder
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.compare_runs import RunComparison
    from elasticflow.trials.fault_actions import DoneFault
    from elasticflow.trials.fault_plan import Fault, FaultPlan
    from elasticflow.trials.trial import Trial


@dataclass(frozen=True)
class FaultCost:
    """What one fault led to, up to the next one.

    Attributes:
        fault: What was done.
        words: What was done, for people.
        restarts: Class of each generation that ended.
        seconds: From the fault, or from the drain it led to, until the next generation had finished its first step;
            None if no generation ended.
        redone: Steps that were done again.
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
    """How the disturbed run compares with the undisturbed one.

    Attributes:
        run: The disturbed run's folder.
        steps: Steps that the disturbed run finished.
        seconds: That the undisturbed and the disturbed run took.
        comparison: Of the two runs.
        costs: Of each fault that was done, in order.
        undone: Number of faults that were not done, because the run had ended before.
    """

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
        plan: What is done.
        workers: Workers of each node.
        steps: Steps of each run.
        tolerance: Of `compare_losses`.
        scratch: Folder for both runs.
        begin: Called with each trial before it starts; returns what is called with its steps so far.

    Raises:
        TrialFailedError: one of the runs failed.
        TrialRefusedError: the job is too short, or the path of *scratch* has blanks.
    """
    if re.search(r"[\s,]", str(scratch)):  # cues are named in a list of clauses
        raise TrialRefusedError(
            f"the scratch folder's path has a blank or a comma: {scratch}",
            "choose another with --keep or TMPDIR",
        )
    mark = secrets.token_hex(2)
    began = time.monotonic()
    undisturbed = trial.undisturbed(1, workers * plan.nodes, steps)
    reference = TrialRun(undisturbed, subject, scratch, mark).play(begin(undisturbed))
    length = max(record.step for record in reference)
    if length < steps:
        trial.check_length(length)
        plan = replace(plan, faults=tuple(each for each in plan.faults if each.step <= length - 2))
    between = time.monotonic()
    disturbed = trial.with_faults(2, workers, length, plan)
    played = TrialRun(disturbed, subject, scratch, mark)
    records = played.play(begin(disturbed))
    if subject.job.train.consistency == "exact":
        comparison = compare_runs.compare_bits(reference, compare_runs.without_lost_steps(records))
        comparison = replace(comparison, redone=compare_runs.redone(records))
    else:
        comparison = compare_runs.compare_losses(reference, records, tolerance)
    done = played.done
    return ChaosOutcome(
        run=played.run,
        steps=max(record.step for record in records),
        seconds=(between - began, time.monotonic() - between),
        comparison=comparison,
        costs=costs(done, History.read(played.run), records),
        undone=len(plan.faults) - len(done),
    )


def costs(done: Sequence[DoneFault], history: History, records: Sequence[Record]) -> tuple[FaultCost, ...]:
    """Return what each fault led to: what happened between it and the next one, but for the run's own end."""
    lost = _lost(records)
    ends = [each.at for each in done[1:]] + [math.inf]
    return tuple(_cost(each, end, history, lost) for each, end in zip(done, ends, strict=True))


def _lost(records: Sequence[Record]) -> dict[int, int]:
    """Return how many steps of each generation the next one did not go on from."""
    begun = {record.generation: record.step for record in records if record.loss is None}
    last = {record.generation: record.step for record in records}
    return {one: max(0, last[one] - begun[after]) for one, after in itertools.pairwise(sorted(begun))}


def _cost(done: DoneFault, end: float, history: History, lost: Mapping[int, int]) -> FaultCost:
    def is_within(at: float | None) -> bool:
        return at is not None and done.at <= at < end

    generations = list(history.generations.values())
    stopped = [each for each in generations if each.stop is not None][:-1]
    stops = [each.stop for each in stopped if each.stop is not None and is_within(each.stop.at)]
    seconds = None
    if stops:
        first = stops[0].at or 0.0
        firsts = [each.first_step_at for each in generations if is_within(each.first_step_at)]
        resumed = [at for at in firsts if at is not None and at >= first]
        # Until a drain began a node was on its way, and nothing was lost.
        drains = [each.drain_at for each in generations if is_within(each.drain_at)]
        began = max((at for at in drains if at is not None and at <= first), default=done.at)
        seconds = round(max(resumed) - began, 3) if resumed else None
    return FaultCost(
        fault=done.fault,
        words=done.fault.words(done.rank),
        restarts=tuple(stop.kind for stop in stops),
        seconds=seconds,
        redone=sum(lost.get(stop.generation, 0) for stop in stops),
        snapshots=sum(each.state != "committed" and is_within(each.at) for each in history.snapshots),
    )
