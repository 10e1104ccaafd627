"""The job-wide restart budget: what a failure costs, and whether the job goes on.

The ledger is the only state, so the next launch counts on from where this one stopped. The clock is
an argument; nothing else here depends on when or where it runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from elasticflow.launcher.restarts.restart_ledger import Entry, RestartLedger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import RestartPlan

RetryAdvice = Literal["retry", "hopeless", "unknown"]

# Nobody's fault: a resize or a drain was asked for, a preempted node was taken, a dead agent is started again.
FREE = frozenset({"preempted", "resized", "drained", "agent_lost"})
# An agent that dies again and again without a finished step is no accident: from then on it costs.
FREE_AGENTS = 3

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
_AGAIN = "the same error came again without progress"
_FINAL = "what the job was refused for would be refused again"


@dataclass(frozen=True)
class Decision:
    """What follows from one failure.

    Attributes:
        restart: The job goes on with another generation.
        delay_s: Seconds to wait before it; 0 unless failures repeat without progress.
        left: Restarts left in the budget.
        reason: In words, for the verdict: why it stops, or what it cost.
        charged: The failure counted against the budget.
        spent: It stops because the budget is spent (exit code 3), not because it cannot succeed (exit code 1).
        refilled: Earlier failures have left the window since the last one, and the budget was full again.
    """

    restart: bool
    delay_s: float
    left: int
    reason: str
    charged: bool
    spent: bool = False
    refilled: bool = False


class Budget:
    """The restart budget of one run, kept in its ledger file.

    A failure counts while it lies inside the window that `restarts.refill` states: for that many seconds, or
    until that many steps or epochs were finished beyond it. Without `refill` it counts for the whole run.
    """

    def __init__(self, plan: RestartPlan, ledger: Path, clock: Callable[[], float] = time.time) -> None:
        self._plan = plan
        self._ledger = RestartLedger(ledger)
        self._clock = clock

    @property
    def size(self) -> int:
        """Failures allowed in one window."""
        return self._plan.budget

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every failure of the run so far, oldest first."""
        return tuple(self._entries)

    @property
    def ledger(self) -> RestartLedger:
        """Where they are kept."""
        return self._ledger

    @property
    def _entries(self) -> list[Entry]:
        return self._ledger.entries

    def left(self, step: int | None = None, epoch: int | None = None) -> int:
        """Return the restarts left, given how far training is now."""
        high, high_epoch = self._high(step, epoch)
        return max(0, self._plan.budget - len(self._counting(self._clock(), high, high_epoch)))

    def charge(
        self,
        failure_class: str,
        *,
        step: int | None,
        fingerprint: str = "",
        generation: int = 0,
        epoch: int | None = None,
        retry_advice: RetryAdvice = "unknown",
        is_traced_fault: bool = False,
        is_final: bool = False,
    ) -> Decision:
        """Count one failure and return whether to go on; it is on disk before this returns.

        Args:
            failure_class: One of `failures.CLASSES`; `peer` counts as a crash.
            step: Last step finished in the generation that failed, or None when it failed while building.
            fingerprint: Equal for the same error (`Failure.fingerprint`).
            generation: The generation that failed.
            epoch: Epoch of *step*.
            retry_advice: What the run's snapshots say about another try; unknown: the ledger decides.
            is_traced_fault: The worker died of what it did itself, at a place that the fingerprint tells.
            is_final: The worker said that another try would end in the same way.
        """
        now = self._clock()
        kind = "crash" if failure_class == "peer" else failure_class
        high, high_epoch = self._high(step, epoch)
        streak = self._without_progress(high)
        charged = kind not in FREE or (kind == "agent_lost" and self._lost_agents(high) >= FREE_AGENTS)
        before = self._counting(now, high, high_epoch)
        refilled = not before and bool(self._counted_last_time())
        entry = Entry(now, kind, step, epoch, high, high_epoch, generation, fingerprint, charged)
        hopeless = self._hopeless(entry, retry_advice, is_traced_fault=is_traced_fault, is_final=is_final)
        self._ledger.append(entry)

        left = self._plan.budget - len(before) - int(charged)
        if hopeless is not None:
            return Decision(False, 0.0, max(0, left), hopeless, charged, refilled=refilled)
        if left < 0:
            return Decision(False, 0.0, 0, self._spent(len(before)), charged, spent=True, refilled=refilled)
        delay_s = 0.0 if kind in {"resized", "drained", "preempted"} else _delay_s(streak)
        reason = f"{left} of {self._plan.budget} restarts left" if charged else "free of charge"
        return Decision(True, delay_s, left, reason, charged, refilled=refilled)

    def _high(self, step: int | None, epoch: int | None) -> tuple[int, int]:
        last = self._entries[-1] if self._entries else None
        high, high_epoch = (last.high, last.high_epoch) if last else (0, 0)
        return max(high, step or 0), max(high_epoch, epoch or 0)

    def _counting(self, now: float, high: int, high_epoch: int) -> list[Entry]:
        plan = self._plan
        return [
            e
            for e in self._entries
            if e.charged
            and not (plan.refill_s is not None and now - e.time >= plan.refill_s)
            and not (plan.refill_steps is not None and high - e.high >= plan.refill_steps)
            and not (plan.refill_epochs is not None and high_epoch - e.high_epoch >= plan.refill_epochs)
        ]

    def _counted_last_time(self) -> list[Entry]:
        if not self._entries:
            return []
        last = self._entries[-1]
        return self._counting(last.time, last.high, last.high_epoch)

    def _without_progress(self, high: int) -> int:
        return sum(e.high >= high for e in self._entries if e.failure_class not in FREE - {"agent_lost"})

    def _lost_agents(self, high: int) -> int:
        return sum(e.high >= high for e in self._entries if e.failure_class == "agent_lost")

    def _hopeless(
        self, now: Entry, retry_advice: RetryAdvice, *, is_traced_fault: bool, is_final: bool
    ) -> str | None:
        if retry_advice != "unknown":
            return None if retry_advice == "retry" else _AGAIN
        if is_final:
            return _FINAL
        if now.failure_class == "user_error":
            if now.step is None:
                return "an error before the first step would come again"
            if self._is_repeated(now):
                return _AGAIN
        if is_traced_fault and now.step is None and self._is_repeated(now):
            return "it crashed twice in the same way before the first step"
        if now.failure_class == "diverged" and self._is_repeated(now):
            return "the replicas went apart in the same way again, without progress"
        if now.failure_class == "nonfinite" and any(e.step == now.step for e in self._of(now)):
            return "the loss was not finite at the same step again"
        return None

    def _is_repeated(self, now: Entry) -> bool:
        return any(e.fingerprint == now.fingerprint and e.high >= now.high for e in self._of(now))

    def _of(self, now: Entry) -> list[Entry]:
        return [e for e in self._entries if e.failure_class == now.failure_class]

    def _spent(self, counted: int) -> str:
        plan = self._plan
        if plan.budget == 0:
            return "restarts.budget is 0"
        window = next(
            (
                f" within {amount:g} {unit}"
                for amount, unit in (
                    (plan.refill_s, "s"),
                    (plan.refill_steps, "steps"),
                    (plan.refill_epochs, "epochs"),
                )
                if amount is not None
            ),
            "",
        )
        return f"{counted + 1} failures{window}, restarts.budget is {plan.budget}"


def _delay_s(streak: int) -> float:
    # The exponent is capped so that a long streak cannot overflow a float.
    return 0.0 if streak == 0 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(streak - 1, 16))
