"""How a launch ended: its status, exit code and last event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import errors, events

if TYPE_CHECKING:
    from elasticflow.events import Event
    from elasticflow.launcher.restarts.failures import Failure


@dataclass(frozen=True)
class Verdict:
    """How the launch ended: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: Event
    fields: dict[str, Any]


def finished(step: int, restarts: int, stopped: str | None) -> Verdict:
    """Training reached its end, or the job's own code ended it, for the reason *stopped*."""
    fields = {"step": step, "restarts": restarts, "stopped": stopped}
    return Verdict("finished", errors.FINISHED, events.RUN_FINISHED, fields)


def interrupted(step: int, reason: str, code: int = errors.INTERRUPTED) -> Verdict:
    """Training did not reach its end; the same command goes on."""
    return Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, "step": step})


def failed(
    step: int,
    failure_class: str,
    error: str,
    code: int = errors.ANSWER_IS_NO,
    failure: Failure | None = None,
    why: str | None = None,
) -> Verdict:
    """It failed with class *failure_class*; *why* says why it is not tried again."""
    rank, exit_code = (None, None) if failure is None else (failure.rank, failure.exit_code)
    fields = {"class": failure_class, "error": error, "why": why, "rank": rank, "exit_code": exit_code}
    return Verdict("failed", code, events.RUN_FAILED, {**fields, "step": step})


def taken_over(step: int, generation: int) -> Verdict:
    """The run is another launch's now: going on would take it away from that one again."""
    error = f"another launch of this run goes on from its snapshots: generation {generation + 1}"
    return failed(step, "taken_over", error)
