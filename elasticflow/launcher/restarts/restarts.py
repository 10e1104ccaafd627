"""Whether another generation follows one that failed: budget, suspected snapshots, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.budget import Budget, Decision
    from elasticflow.launcher.restarts.failures import Failure
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.restarts.snapshot_rollback import SnapshotRollback


class Restarts:
    """Decides about restarts, and tells what they cost."""

    def __init__(self, journal: Journal, budget: Budget, rollback: SnapshotRollback) -> None:
        self._journal, self._budget, self._rollback = journal, budget, rollback

    def decide(
        self, generation: Generation, kind: str, error: str, failure: Failure | None = None
    ) -> Decision:
        """Charge the end of *generation* to the budget and return whether the job goes on.

        Args:
            generation: What ended; number 0 if none could be formed.
            kind: A class of `failures.CLASSES`.
            error: In one line.
            failure: The worker that failed first, if it was one.
        """
        retry_advice = self._rollback.retry_advice(generation, failure)
        decision = self._budget.charge(
            kind,
            step=generation.step,
            epoch=generation.epoch,
            fingerprint=f"{kind}: {error}" if failure is None else failure.fingerprint,
            generation=generation.number,
            retry_advice=retry_advice,
            is_traced_fault=failure is not None and failure.is_traced_fault,
            is_final=failure is not None and failure.is_final,
        )
        for happened, name, fields in (
            (decision.refilled, events.BUDGET_REFILLED, {"budget": self._budget.size}),
            (decision.charged, events.BUDGET_CHARGED, {"class": kind, "left": decision.left}),
            (decision.spent, events.BUDGET_SPENT, {"class": kind, "budget": self._budget.size}),
        ):
            if happened:
                self._journal.event(name, **fields)
        self._rollback.conclude(goes_on=decision.restart)
        if decision.restart:
            self._journal.update(at_once=True, restarts=self._journal.state["restarts"] + 1)
        return decision
