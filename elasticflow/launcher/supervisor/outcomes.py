"""Outcomes of a launch: status, exit code and last event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import errors, events
from elasticflow.launcher.supervisor.generations import Cause

if TYPE_CHECKING:
    from elasticflow.events import Event


@dataclass(frozen=True)
class Verdict:
    """Outcome of a launch: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: Event
    fields: dict[str, Any]


def finished(step: int, restarts: int, stopped: str | None) -> Verdict:
    """Training reached its end, or the job's own code ended it, for the reason *stopped*."""
    fields = {"step": step, "restarts": restarts, "stopped": stopped}
    return Verdict("finished", errors.FINISHED, events.RUN_FINISHED, fields)


def interrupted(step: int, reason: str, code: int = errors.INTERRUPTED) -> Verdict:
    """Training did not reach its end; the same command continues."""
    return Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, "step": step})


def failed(step: int, cause: Cause, code: int = errors.ANSWER_IS_NO, why: str | None = None) -> Verdict:
    """The launch failed because of *cause*; *why* says why it is not tried again."""
    worker = cause.failure
    fields = {
        "class": cause.failure_class,
        "error": cause.error,
        "why": why,
        "rank": None if worker is None else worker.rank,
        "exit_code": None if worker is None else worker.exit_code,
        "step": step,
    }
    return Verdict("failed", code, events.RUN_FAILED, fields)


def taken_over(step: int, generation: int) -> Verdict:
    """Another launch has the run now: continuing would take the run away from that launch."""
    error = f"another launch of this run resumes from its snapshots: generation {generation + 1}"
    return failed(step, Cause("taken_over", error))
