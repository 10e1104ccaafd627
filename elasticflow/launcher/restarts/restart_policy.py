"""Decides, from the run's ledger alone, whether the job continues after a failure, and at which cost.

Nothing here acts: the clock and the ledger's entries are arguments, and the entry that the failure adds to the ledger
is part of the answer. So the next launch, which reads the same ledger, continues the count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from elasticflow.launcher.restarts.failure_classes import FAILURES, OUTCOMES, SAME_ERROR_AGAIN, FailureRow
from elasticflow.launcher.restarts.restart_ledger import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.compiler.plan.launch_plan import RestartPlan

RetryAdvice = Literal["retry", "hopeless", "unknown"]
"""Advice of the run's snapshots about another try (`snapshot_rollback.py`)."""

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
# A node's agents that end so often in a row, in the same way and before they are ready, would do so again.
_UNREADY_ENDS = 3
_NUMBER = re.compile(r"\d+")
_ORDINARY = FailureRow()


@dataclass(frozen=True)
class FailedAttempt:
    """A generation that failed, or could not be formed.

    Attributes:
        failure_class: A class of `failure_classes.CLASSES`.
        fingerprint: Equal for the same error (`Failure.fingerprint`).
        step: Last step that the generation finished; None if it failed before its first one.
        generation: Number of the generation; 0 if none could be formed.
        restored_from: The snapshot that it resumed from; None: none was chosen yet.
        is_traced_fault: The worker's own code made it die, at a place that the fingerprint names.
        is_final: The worker said that another try would end in the same way.
        unready_ends: The causes of the ends of the node's agents since an agent was ready, in order; empty text for an end that the
            agent did not cause.
        may_have_trained: A step may have been finished although none is known.
    """

    failure_class: str
    error: str = ""
    fingerprint: str = ""
    step: int | None = None
    epoch: int | None = None
    generation: int = 0
    restored_from: str | None = None
    can_come_from_snapshot: bool = False
    is_traced_fault: bool = False
    is_final: bool = False
    unready_ends: tuple[str, ...] = ()
    may_have_trained: bool = False


@dataclass(frozen=True)
class Decision:
    """Consequences of one failure.

    Attributes:
        delay_s: Seconds to wait before the restart; 0 unless failures repeat without progress.
        reason: Words for the verdict: why the job stops, or the failure's cost.
        spent: The job stops because the budget is spent (exit code 3), not because it cannot succeed (exit code 1).
        refilled: Earlier failures have left the window since the last one, and the budget was full again.
        entry: Line for the ledger; None if no generation ended.
    """

    restart: bool
    delay_s: float
    left: int
    reason: str
    charged: bool
    spent: bool = False
    refilled: bool = False
    entry: LedgerEntry | None = None


@dataclass(frozen=True)
class RestartPolicy:
    """The job-wide restart budget, and the failures that no budget helps against.

    A failure counts while it lies inside the window that `restarts.refill` states: for that many seconds, or
    until that many steps or epochs were finished beyond it. Without `refill` it counts for the whole run.
    """

    plan: RestartPlan

    def decide(
        self,
        failed: FailedAttempt,
        ledger: Sequence[LedgerEntry],
        now: float,
        advice: RetryAdvice = "unknown",
    ) -> Decision:
        """Return whether the job continues after *failed*.

        Args:
            ledger: Every failure of the run before it, oldest first.
            now: Unix time.
            advice: Advice of the run's snapshots about another try; unknown: the ledger decides.
        """
        if would_end_again(failed.unready_ends):
            left = self.left(ledger, now)
            return Decision(False, 0.0, left, "it ended in the same way each time", charged=False)
        entry = self._entry_of(failed, ledger, now)
        counting = self._counting(ledger, now, entry.high, entry.high_epoch)
        is_refilled = not counting and bool(self._counting_at_last_failure(ledger))
        left = self.plan.budget - len(counting) - int(entry.charged)
        decision = Decision(
            restart=False,
            delay_s=0.0,
            left=max(0, left),
            reason="",
            charged=entry.charged,
            refilled=is_refilled,
            entry=entry,
        )
        hopeless = _why_hopeless(failed, entry, ledger, advice)
        if hopeless is not None:
            return replace(decision, reason=hopeless)
        if left < 0:
            return replace(decision, reason=self._why_spent(len(counting)), spent=True)
        cost = f"{left} of {self.plan.budget} restarts left" if entry.charged else "free of charge"
        return replace(decision, restart=True, delay_s=_delay_s(entry, ledger), reason=cost)

    def left(
        self, ledger: Sequence[LedgerEntry], now: float, step: int | None = None, epoch: int | None = None
    ) -> int:
        """Return the restarts left at the unix time *now*, given how far training is."""
        high, high_epoch = _highest(ledger, step, epoch)
        return max(0, self.plan.budget - len(self._counting(ledger, now, high, high_epoch)))

    def _entry_of(self, failed: FailedAttempt, ledger: Sequence[LedgerEntry], now: float) -> LedgerEntry:
        counted_as = FAILURES.get(failed.failure_class, _ORDINARY).counted_as or failed.failure_class
        high, high_epoch = _highest(ledger, failed.step, failed.epoch)
        before = sum(e.high >= high for e in ledger if e.failure_class == counted_as)
        return LedgerEntry(
            time=now,
            failure_class=counted_as,
            step=failed.step,
            epoch=failed.epoch,
            high=high,
            high_epoch=high_epoch,
            generation=failed.generation,
            fingerprint=failed.fingerprint,
            charged=counted_as not in OUTCOMES and before >= FAILURES.get(counted_as, _ORDINARY).free_times,
        )

    def _counting(
        self, ledger: Sequence[LedgerEntry], now: float, high: int, high_epoch: int
    ) -> list[LedgerEntry]:
        plan = self.plan
        return [
            entry
            for entry in ledger
            if entry.charged
            and not (plan.refill_s is not None and now - entry.time >= plan.refill_s)
            and not (plan.refill_steps is not None and high - entry.high >= plan.refill_steps)
            and not (plan.refill_epochs is not None and high_epoch - entry.high_epoch >= plan.refill_epochs)
        ]

    def _counting_at_last_failure(self, ledger: Sequence[LedgerEntry]) -> list[LedgerEntry]:
        if not ledger:
            return []
        last = ledger[-1]
        return self._counting(ledger, last.time, last.high, last.high_epoch)

    def _why_spent(self, counted: int) -> str:
        plan = self.plan
        if plan.budget == 0:
            return "restarts.budget is 0"
        windows = ((plan.refill_s, "s"), (plan.refill_steps, "steps"), (plan.refill_epochs, "epochs"))
        window = next((f" within {size:g} {unit}" for size, unit in windows if size is not None), "")
        return f"{counted + 1} failures{window}, restarts.budget is {plan.budget}"


def unready_end(cause: str, *, is_its_own_doing: bool) -> str:
    """Return how an agent ended before it was ready, as `FailedAttempt.unready_ends` has it.

    Agents that were killed from outside, or whose helpers were, say nothing about the next: those are the budget's.
    """
    return _NUMBER.sub("#", cause) if is_its_own_doing else ""


def would_end_again(unready_ends: Sequence[str]) -> bool:
    """Return whether a node's last agents all ended in the same way, which was their own doing."""
    last = unready_ends[-_UNREADY_ENDS:]
    return len(last) == _UNREADY_ENDS and last[0] != "" and len(set(last)) == 1


def _highest(ledger: Sequence[LedgerEntry], step: int | None, epoch: int | None) -> tuple[int, int]:
    """Return the highest step that the run has ever finished, and its epoch."""
    high, high_epoch = (ledger[-1].high, ledger[-1].high_epoch) if ledger else (0, 0)
    return max(high, step or 0), max(high_epoch, epoch or 0)


def _why_hopeless(
    failed: FailedAttempt, entry: LedgerEntry, ledger: Sequence[LedgerEntry], advice: RetryAdvice
) -> str | None:
    """Return why another try would end in the same way; None if it may not."""
    if advice != "unknown":
        return SAME_ERROR_AGAIN if advice == "hopeless" else None
    if failed.is_final:
        return "what the job was refused for would be refused again"
    row = FAILURES.get(entry.failure_class, _ORDINARY)
    of_class = [e for e in ledger if e.failure_class == entry.failure_class]
    is_same_error = any(e.fingerprint == entry.fingerprint and e.high >= entry.high for e in of_class)
    is_same_step = any(e.step == entry.step for e in of_class)
    is_before_first_step = entry.step is None and not failed.may_have_trained
    if row.final_before_first_step and is_before_first_step:
        return "an error before the first step would come again"
    if {"same error": is_same_error, "same step": is_same_step, None: False}[row.final_repeat]:
        is_progress_unknown = entry.step is None and failed.may_have_trained
        return "the same error came again" if is_progress_unknown else row.repeat_reason
    if failed.is_traced_fault and is_before_first_step and is_same_error:
        return "it crashed twice in the same way before the first step"
    return None


def _was_tried(entry: LedgerEntry) -> bool:
    """Return True if what failed was an attempt to train: no outcome, and no agent that ended between two generations."""
    is_idle_agent = entry.failure_class == "agent_lost" and entry.generation == 0
    return entry.failure_class not in OUTCOMES and not is_idle_agent


def _delay_s(entry: LedgerEntry, ledger: Sequence[LedgerEntry]) -> float:
    """Return the seconds to wait: doubled with each failure since the last progress; none after an outcome.

    A run whose snapshots were lost trains steps again: only failures that came as far as this one count.

    An agent that ended while no generation ran adds no wait: it is started again at once, and the nodes that are ready
    would only stand idle.
    """
    reached = entry.step or 0
    streak = sum(e.high >= entry.high and (e.step or 0) >= reached for e in ledger if _was_tried(e))
    if streak == 0 or not _was_tried(entry):
        return 0.0
    # The exponent is capped so that a long streak cannot overflow a float.
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(streak - 1, 16))
