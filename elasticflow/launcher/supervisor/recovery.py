"""Handles a failure: records and charges it, sets snapshots aside or clears them, continues the job or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.restarts.restart_policy import FailedAttempt
from elasticflow.launcher.restarts.snapshot_rollback import SnapshotRollback
from elasticflow.launcher.supervisor.commands import (
    ClearSnapshot,
    Command,
    RecordEvent,
    RecordFailure,
    SetSnapshotAside,
    UpdateState,
)
from elasticflow.launcher.supervisor.generations import Generation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
    from elasticflow.launcher.restarts.restart_policy import Decision, RestartPolicy
    from elasticflow.launcher.restarts.snapshot_rollback import Cleared, Suspect
    from elasticflow.launcher.supervisor.generations import Cause


def attempt_of(
    cause: Cause,
    generation: Generation | None = None,
    unready_ends: tuple[str, ...] = (),
    *,
    is_script: bool = False,
) -> FailedAttempt:
    """Return the facts about a failure that the restart policy and the snapshot rollback need.

    Args:
        generation: The failed generation; None if none could be formed.
        unready_ends: Ends of the node's agents before they were ready.
        is_script: Workers run a script of their own, which may train without telling its steps.
    """
    failure, generation = cause.failure, generation or Generation(0)
    fingerprint = f"{cause.failure_class}: {cause.error}"
    if failure is not None:
        fingerprint = failure.fingerprint(knows_steps=not is_script or generation.step is not None)
    return FailedAttempt(
        failure_class=cause.failure_class,
        error=cause.error,
        fingerprint=fingerprint,
        step=generation.step,
        epoch=generation.epoch,
        generation=generation.number,
        restored_from=generation.restored_from,
        can_come_from_snapshot=failure is not None and failure.can_come_from_snapshot,
        is_traced_fault=failure is not None and failure.is_traced_fault,
        is_final=failure is not None and failure.is_final,
        unready_ends=unready_ends,
        may_have_trained=is_script,
    )


class Recovery:
    """The failures of a run, and what has followed from them."""

    def __init__(self, policy: RestartPolicy, ledger: Iterable[LedgerEntry], restarts: int) -> None:
        self._policy, self._ledger = policy, list(ledger)
        self._rollback = SnapshotRollback()
        self._suspect: Suspect | None = None
        self.restarts = restarts

    def needs_snapshots(self, attempt: FailedAttempt) -> bool:
        """Return whether `decide` has to know the run's snapshots."""
        return self._rollback.needs_snapshots(attempt)

    def decide(
        self, attempt: FailedAttempt, snapshots: Sequence[str], now: float
    ) -> tuple[Decision, list[Command]]:
        """Return whether the job continues after *attempt*, and the commands that follow.

        Args:
            snapshots: Names of the snapshots that could be restored, newest first, where they are needed.
            now: Unix time.
        """
        judgement = self._rollback.judge(attempt, snapshots)
        self._rollback = judgement.rollback
        decision = self._policy.decide(attempt, self._ledger, now, judgement.advice)
        commands = _clear(judgement.cleared)
        if decision.entry is not None:
            self._ledger.append(decision.entry)
            commands.append(RecordFailure(decision.entry))
        commands += _record_budget(self._policy.plan.budget, attempt, decision)
        if not decision.restart:
            given_up = self._rollback.given_up()
            self._rollback = given_up.rollback
            return decision, commands + _clear(given_up.cleared)
        self._suspect = judgement.suspect
        if self._suspect is not None:
            commands.append(SetSnapshotAside(self._suspect.name, self._suspect.reason))
        self.restarts += 1
        commands.append(UpdateState({"restarts": self.restarts}))
        return decision, commands

    def set_aside(self, name: str) -> None:
        """Take in that snapshot *name* was set aside, as asked."""
        assert self._suspect is not None
        assert self._suspect.name == name, "nothing is set aside unasked"
        self._rollback = self._rollback.with_set_aside(self._suspect)


def _record_budget(budget: int, attempt: FailedAttempt, decision: Decision) -> list[Command]:
    failure_class = attempt.failure_class
    records: list[Command] = []
    if decision.refilled:
        records.append(RecordEvent(events.BUDGET_REFILLED, {"budget": budget}))
    if decision.charged:
        records.append(RecordEvent(events.BUDGET_CHARGED, {"class": failure_class, "left": decision.left}))
    if decision.spent:
        records.append(RecordEvent(events.BUDGET_SPENT, {"class": failure_class, "budget": budget}))
    return records


def _clear(cleared: Iterable[Cleared]) -> list[Command]:
    return [ClearSnapshot(name, reason) for name, reason in cleared]
