"""Whether another generation follows one that failed: budget, suspected snapshots, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.restarts.restart_policy import FailedAttempt

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.failures import Failure
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.restarts.restart_ledger import RestartLedger
    from elasticflow.launcher.restarts.restart_policy import Decision, RestartPolicy
    from elasticflow.launcher.restarts.snapshot_rollback import SnapshotRollback


class Restarts:
    """Decides about restarts, and tells what they cost."""

    def __init__(
        self, journal: Journal, policy: RestartPolicy, ledger: RestartLedger, rollback: SnapshotRollback
    ) -> None:
        self._journal, self._policy, self._ledger, self._rollback = journal, policy, ledger, rollback

    def decide(
        self,
        generation: Generation,
        kind: str,
        error: str,
        now: float,
        failure: Failure | None = None,
        unready_ends: tuple[str, ...] = (),
    ) -> Decision:
        """Charge the end of *generation* to the budget and return whether the job goes on.

        Args:
            generation: What ended; number 0 if none could be formed.
            kind: A class of `failure_classes.CLASSES`.
            error: In one line.
            now: Unix time.
            failure: The worker that failed first, if it was one.
            unready_ends: How the agents of a node ended before they were ready (`FailedAttempt`).
        """
        failed = FailedAttempt(
            failure_class=kind,
            fingerprint=f"{kind}: {error}" if failure is None else failure.fingerprint,
            step=generation.step,
            epoch=generation.epoch,
            generation=generation.number,
            is_traced_fault=failure is not None and failure.is_traced_fault,
            is_final=failure is not None and failure.is_final,
            unready_ends=unready_ends,
        )
        advice = self._rollback.retry_advice(generation, failure)
        decision = self._policy.decide(failed, self._ledger.entries, now, advice)
        if decision.entry is not None:
            self._ledger.append(decision.entry)
        budget = self._policy.plan.budget
        for happened, name, fields in (
            (decision.refilled, events.BUDGET_REFILLED, {"budget": budget}),
            (decision.charged, events.BUDGET_CHARGED, {"class": kind, "left": decision.left}),
            (decision.spent, events.BUDGET_SPENT, {"class": kind, "budget": budget}),
        ):
            if happened:
                self._journal.event(name, **fields)
        self._rollback.conclude(goes_on=decision.restart)
        if decision.restart:
            self._journal.update(at_once=True, restarts=self._journal.state["restarts"] + 1)
        return decision
