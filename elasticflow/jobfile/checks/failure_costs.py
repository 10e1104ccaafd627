"""The cost of a failure and of a preemption, as far as the job file tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.system.units import intervals, parse_duration, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source

# Within the grace a worker ends its step, agrees with the others, stages and commits: no machine does that faster.
_LEAST_GRACE_S = 1.0


def check_failure_costs(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning for a grace too short for a snapshot, and for a budget that refills faster than snapshots come."""
    snapshots, restarts = tables.get("snapshots"), tables.get("restarts")
    if snapshots is None:
        return
    if parse_duration(snapshots.grace) < _LEAST_GRACE_S:
        message = f'snapshots.grace is "{snapshots.grace}": a preempted worker has no time to take a snapshot'
        remedy = (
            "a step must end and a snapshot be written in this time: set the time between the signal and the kill,\n"
            "such as Slurm's KillWait (30 s) or Kubernetes' terminationGracePeriodSeconds (30 s)"
        )
        yield source.problem(
            codes.SHORT_GRACE, message, ("snapshots", "grace"), severity="warning", remedy=remedy
        )
    if restarts is not None and restarts.refill is not None:
        yield from _refill(source, restarts.refill, snapshots.every)


def _refill(source: Source, refill: str, every: str | list[str]) -> Iterator[Diagnostic]:
    """Yield a warning for a refill by time that is shorter than the time between snapshots.

    Time passes even if training makes no progress; a refill after steps or epochs needs progress.
    """
    due = [parse_interval(text) for text in intervals(every)]
    if parse_interval(refill).unit != "s" or any(interval.unit != "s" for interval in due):
        return
    first = min(due)
    if parse_interval(refill).amount < first.amount:
        message = f'restarts.refill ("{refill}") is shorter than the time between snapshots ({first})'
        remedy = (
            "a job that fails between the two goes back to the same snapshot for ever, and the budget never stops it:\n"
            'take snapshots more often, or refill by progress, such as "1000 steps"'
        )
        yield source.problem(
            codes.ENDLESS_REFILL, message, ("restarts", "refill"), severity="warning", remedy=remedy
        )
