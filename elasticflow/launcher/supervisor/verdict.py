"""How a launch ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import errors, events

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.failures import Failure


@dataclass(frozen=True)
class Verdict:
    """How the launch ended: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: str
    fields: dict[str, Any]


class Verdicts:
    """Makes verdicts, with the step that the run has reached."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def finished(self, stopped: str | None) -> Verdict:
        """Training reached its end, or the job's own code ended it, for the reason *stopped*."""
        fields = {**self._figures(), "restarts": self._journal.state["restarts"], "stopped": stopped}
        return Verdict("finished", errors.FINISHED, events.RUN_FINISHED, fields)

    def interrupted(self, reason: str, code: int) -> Verdict:
        """Training did not reach its end; the same command goes on."""
        return Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, **self._figures()})

    def failed(
        self, kind: str, error: str, code: int, failure: Failure | None = None, why: str | None = None
    ) -> Verdict:
        """It failed with class *kind*; *why* says why it is not tried again."""
        rank, exit_code = (None, None) if failure is None else (failure.rank, failure.exit_code)
        fields = {"class": kind, "error": error, "why": why, "rank": rank, "exit_code": exit_code}
        return Verdict("failed", code, events.RUN_FAILED, fields | self._figures())

    def _figures(self) -> dict[str, Any]:
        return {"step": self._journal.state["step"]}
