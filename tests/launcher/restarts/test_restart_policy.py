from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.compiler.plan.launch_plan import RestartPlan
from elasticflow.launcher.restarts.failure_classes import CLASSES, FAILURES, OUTCOMES, FailureClass
from elasticflow.launcher.restarts.restart_ledger import LedgerEntry, RestartLedger, read_ledger
from elasticflow.launcher.restarts.restart_policy import (
    LONGEST_DELAY_S,
    Decision,
    FailedAttempt,
    RestartPolicy,
    RetryAdvice,
    unready_end,
)

FREE = (OUTCOMES - {"finished"}) | {name for name, row in FAILURES.items() if row.free_times}
FREE_AGENTS = FAILURES["agent_lost"].free_times


class Run:
    """The failures of one run, each decided about at *now* and then written down.

    Attributes:
        now: Unix time.
        entries: Every failure so far.
    """

    def __init__(self, plan: RestartPlan, ledger: Path) -> None:
        self.policy, self._ledger = RestartPolicy(plan), RestartLedger(ledger)
        self.now = 1000.0

    @property
    def entries(self) -> list[LedgerEntry]:
        """What the ledger holds."""
        return self._ledger.entries

    def left(self, step: int | None = None, epoch: int | None = None) -> int:
        """Return the restarts left."""
        return self.policy.left(self.entries, self.now, step, epoch)

    def charge(self, failure_class: str, *, retry_advice: RetryAdvice = "unknown", **facts: Any) -> Decision:
        """Decide about a failure, and write it down."""
        failed = FailedAttempt(failure_class, **facts)
        decision = self.policy.decide(failed, self.entries, self.now, retry_advice)
        assert decision == self.policy.decide(failed, self.entries, self.now, retry_advice)
        assert decision.entry is not None
        self._ledger.append(decision.entry)
        return decision


def plan_of(
    budget: int, *, seconds: float | None = None, steps: int | None = None, epochs: int | None = None
) -> RestartPlan:
    """Return a restart plan with this budget and refill."""
    return RestartPlan(
        budget=budget,
        refill_s=seconds,
        refill_steps=steps,
        refill_epochs=epochs,
        hang_timeout_s=600,
        grace_s=30,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Return where the ledger is to lie."""
    return tmp_path / "run" / "ledger.jsonl"


def test_restarts_as_often_as_the_budget_says(ledger: Path) -> None:
    """A budget of 2 allows two restarts; the third failure spends it."""
    run = Run(plan_of(2), ledger)
    decisions = [run.charge("crash", step=step) for step in (10, 20, 30)]
    assert [d.restart for d in decisions] == [True, True, False]
    assert [d.left for d in decisions] == [1, 0, 0]
    assert [d.spent for d in decisions] == [False, False, True]
    assert decisions[-1].reason == "3 failures, restarts.budget is 2"


def test_a_budget_of_zero_allows_no_restart(ledger: Path) -> None:
    """With budget 0 the first failure ends the run, and the reason says why."""
    decision = Run(plan_of(0), ledger).charge("crash", step=10)
    assert (decision.restart, decision.spent, decision.reason) == (False, True, "restarts.budget is 0")


@pytest.mark.parametrize("name", sorted(FREE))
def test_what_nobody_is_to_blame_for_is_free(ledger: Path, name: str) -> None:
    """Resizes, drains, preemptions and a dead agent leave the budget as it is, even an empty one."""
    run = Run(plan_of(0), ledger)
    decision = run.charge(name, step=10)
    assert (decision.restart, decision.charged, decision.reason) == (True, False, "free of charge")
    assert not run.entries[-1].charged


def test_an_agent_that_keeps_dying_is_charged(ledger: Path) -> None:
    """A dead agent is free, but not for ever: without a finished step the next one costs."""
    run = Run(plan_of(0), ledger)
    decisions = [run.charge("agent_lost", step=10) for _ in range(FREE_AGENTS + 1)]
    assert [d.charged for d in decisions] == [False] * FREE_AGENTS + [True]
    assert decisions[-1].spent


def test_first_restart_has_no_delay_and_delays_grow_without_progress(ledger: Path) -> None:
    """The delay doubles while the same step is never passed, up to a minute, and progress resets it."""
    run = Run(plan_of(100), ledger)
    delays = [run.charge("crash", step=10).delay_s for _ in range(9)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert run.charge("crash", step=11).delay_s == 0.0
    assert run.charge("crash", step=5).delay_s == 1.0, "below the highest step there is no progress"


def test_steps_trained_again_are_progress(ledger: Path) -> None:
    """A run that lost 177 steps with its agent, and is killed every 20 steps then, waits a second each time."""
    run = Run(plan_of(100), ledger)
    assert run.charge("crash", step=177).delay_s == 0.0
    assert {run.charge("crash", step=step).delay_s for step in range(20, 177, 20)} == {1.0}
    assert [run.charge("crash", step=160).delay_s for _ in range(3)] == [2.0, 4.0, 8.0], "no progress since"


def test_agents_that_end_while_no_generation_runs_delay_nothing(ledger: Path) -> None:
    """They are started again at once; the delays of failed generations count those alone."""
    run = Run(plan_of(100), ledger)
    assert {run.charge("agent_lost", generation=0).delay_s for _ in range(9)} == {0.0}
    assert [run.charge("crash", generation=1).delay_s for _ in range(3)] == [0.0, 1.0, 2.0]
    assert run.charge("agent_lost", generation=0).delay_s == 0.0
    assert run.charge("agent_lost", generation=2).delay_s == 4.0
    assert run.charge("storage", generation=0).delay_s == 8.0, (
        "a claim is tried again, which nothing else delays"
    )


def test_a_resize_is_never_delayed(ledger: Path) -> None:
    """Failures without progress do not delay a resize or a drain that follows them."""
    run = Run(plan_of(9), ledger)
    run.charge("crash", step=10)
    run.charge("crash", step=10)
    assert run.charge("resized", step=10).delay_s == 0.0


def test_a_user_error_while_building_ends_the_run_at_once(ledger: Path) -> None:
    """Before a first step the same code would fail again, so no restart is tried and none is said to be spent."""
    decision = Run(plan_of(5), ledger).charge("user_error", step=None, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "an error before the first step would come again"


def test_a_refusal_that_another_try_would_meet_again_ends_the_run_at_once(ledger: Path) -> None:
    """At whatever step it came, and with a full budget; where an older snapshot may fare better that one is tried."""
    run = Run(plan_of(5), ledger)
    decision = run.charge("user_error", step=10, fingerprint="a", is_final=True)
    assert (decision.restart, decision.spent, decision.left) == (False, False, 4)
    assert decision.reason == "what the job was refused for would be refused again"
    assert run.charge("user_error", step=None, fingerprint="a", is_final=True, retry_advice="retry").restart


def test_the_same_user_error_twice_without_progress_ends_the_run(ledger: Path) -> None:
    """Once may be chance; the same error at the same step is not."""
    run = Run(plan_of(5), ledger)
    assert run.charge("user_error", step=10, fingerprint="a").restart
    decision = run.charge("user_error", step=10, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "the same error came again without progress"


def test_nothing_is_said_of_the_progress_of_a_script_that_tells_no_steps(ledger: Path) -> None:
    """The same crash again may have come after hours of training: the budget decides. The same error ends the run."""
    run = Run(plan_of(5), ledger)
    script: dict[str, Any] = {"step": None, "may_have_trained": True}
    assert run.charge("crash", fingerprint="a", is_traced_fault=True, **script).restart
    assert run.charge("crash", fingerprint="a", is_traced_fault=True, **script).restart
    assert run.charge("user_error", fingerprint="b", **script).restart
    assert run.charge("user_error", fingerprint="b", **script).reason == "the same error came again"
    assert run.charge("crash", step=None, fingerprint="c", is_traced_fault=True).restart
    again = run.charge("crash", step=None, fingerprint="c", is_traced_fault=True)
    assert again.reason == "it crashed twice in the same way before the first step"


def test_replicas_that_go_apart_in_the_same_way_again_end_the_run(ledger: Path) -> None:
    """A memory cell fails anywhere; code that writes by rank does it to the same tensor, before any progress."""
    run = Run(plan_of(5), ledger)
    assert run.charge("diverged", step=10, fingerprint="a").restart
    assert run.charge("diverged", step=10, fingerprint="b").restart
    decision = run.charge("diverged", step=10, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "the replicas went apart in the same way again, without progress"


def test_another_user_error_or_progress_in_between_allows_a_restart(ledger: Path) -> None:
    """Two different errors, or the same one further on, are two accidents."""
    run = Run(plan_of(5), ledger)
    assert run.charge("user_error", step=10, fingerprint="a").restart
    assert run.charge("user_error", step=10, fingerprint="b").restart
    assert run.charge("user_error", step=11, fingerprint="a").restart


def test_whoever_knows_more_than_the_ledger_says_whether_there_is_hope(ledger: Path) -> None:
    """An error that came before may stay away next time, and a new one may be without hope; it is charged either way."""
    run = Run(plan_of(5), ledger)
    again = [run.charge("user_error", step=None, fingerprint="a", retry_advice="retry") for _ in range(3)]
    assert [(d.restart, d.left) for d in again] == [(True, 4), (True, 3), (True, 2)]
    last = run.charge("user_error", step=10, fingerprint="b", retry_advice="hopeless")
    assert (last.restart, last.spent, last.left) == (False, False, 1)
    assert last.reason == "the same error came again without progress"


def test_a_loss_that_is_not_finite_at_the_same_step_again_ends_the_run(ledger: Path) -> None:
    """Training is deterministic, so the second time at one step is the proof that it stays so."""
    run = Run(plan_of(5), ledger)
    assert run.charge("nonfinite", step=10).restart
    assert run.charge("nonfinite", step=12).restart
    decision = run.charge("nonfinite", step=12)
    assert (decision.restart, decision.reason) == (False, "the loss was not finite at the same step again")


def test_peer_counts_as_a_crash(ledger: Path) -> None:
    """An error of a collective without any other cause is charged under a class that exists for budgets."""
    run = Run(plan_of(5), ledger)
    run.charge("peer", step=10)
    assert run.entries[-1].failure_class == "crash"


def test_time_refills(ledger: Path) -> None:
    """After the window's seconds a failure no longer counts, and the decision says that the budget was full."""
    run = Run(plan_of(1, seconds=3600), ledger)
    assert run.charge("crash", step=10).left == 0
    run.now += 3599
    assert run.left() == 0
    run.now += 1
    assert run.left() == 1
    decision = run.charge("crash", step=20)
    assert (decision.restart, decision.refilled, decision.left) == (True, True, 0)
    assert not run.charge("crash", step=30).restart


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_progress_refills(ledger: Path, unit: str) -> None:
    """Steps or epochs beyond the failure take it out of the window; doing lost steps again does not."""
    run = Run(plan_of(1, steps=100) if unit == "steps" else plan_of(1, epochs=100), ledger)
    run.charge("crash", step=50, epoch=50)
    assert run.left(step=149, epoch=149) == 0
    assert run.left(step=150, epoch=150) == 1
    assert run.charge("crash", step=150, epoch=150).refilled
    assert run.left(step=60, epoch=60) == 0


def test_the_next_launch_counts_on(ledger: Path) -> None:
    """The ledger file is the budget's only memory, so a resumed run has what is left."""
    Run(plan_of(2), ledger).charge("crash", step=10, generation=3, fingerprint="f", epoch=1)
    run = Run(plan_of(2), ledger)
    assert run.left() == 1
    entry = run.entries[0]
    assert (
        entry.failure_class, entry.step, entry.epoch, entry.generation, entry.fingerprint, entry.charged,
    ) == ("crash", 10, 1, 3, "f", True)  # fmt: skip


def test_a_torn_line_loses_only_itself(ledger: Path) -> None:
    """A ledger cut in the middle of a line by a crash is read, and the next entry starts a line of its own."""
    Run(plan_of(9), ledger).charge("crash", step=10)
    with ledger.open("a") as file:
        file.write('{"time": 1.0, "cl')
    Run(plan_of(9), ledger).charge("hang", step=20)
    assert [e.failure_class for e in read_ledger(ledger)] == ["crash", "hang"]


def test_no_ledger_is_an_empty_one(ledger: Path) -> None:
    """A run that never failed has no ledger file and a full budget."""
    assert read_ledger(ledger) == []
    assert Run(plan_of(3), ledger).left() == 3
    assert not ledger.exists()


CHARGES = st.lists(
    st.tuples(
        st.sampled_from(sorted(CLASSES)),
        st.none() | st.integers(0, 10**12),
        st.floats(0, 10**6),
        st.sampled_from(["a", "b"]),
    ),
    max_size=25,
)
PLANS = st.builds(
    plan_of,
    st.integers(0, 6),
    seconds=st.none() | st.floats(0.1, 10**5),
    steps=st.none() | st.integers(1, 10**6),
)


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, charges=CHARGES)
def test_never_more_restarts_than_the_budget_in_one_window(
    plan: RestartPlan, charges: list[tuple[str, int | None, float, str]]
) -> None:
    """Whatever fails when: restarts never exceed the budget of a window, and the ledger says the same again."""
    with TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        run = Run(plan, ledger)
        for name, step, pause, fingerprint in charges:
            run.now += pause
            before = run.left(step)
            decision = run.charge(name, step=step, fingerprint=fingerprint)
            assert 0 <= decision.left <= plan.budget
            assert 0 <= decision.delay_s <= LONGEST_DELAY_S
            if decision.charged and decision.restart:
                assert before >= 1
                assert decision.left == before - 1
            if decision.spent:
                assert before == 0
                assert not decision.restart
            if not decision.charged:
                assert decision.left == before
        assert Run(plan, ledger).entries == run.entries


def test_every_class_has_its_row() -> None:
    """A new class of failure is one row more."""
    assert set(get_args(FailureClass)) == set(FAILURES)
    assert CLASSES & OUTCOMES == OUTCOMES - {"finished"}


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        (("ended: ImportError: #",), True),
        (("ended: ImportError: #",) * 2, True),
        (("ended: ImportError: #",) * 3, False),
        (("was killed by SIGKILL", *("ended: ImportError: #",) * 3), False),
        (("ended: ImportError: #", "", "ended: ImportError: #"), True),
        (("ended: a", "ended: b", "ended: b"), True),
        (("",) * 3, True),
    ],
)
def test_agents_that_never_get_ready(ends: tuple[str, ...], *, goes_on: bool) -> None:
    """Three ends in a row of their own doing, and all alike, need no fourth; no generation has failed then."""
    failed = FailedAttempt("agent_lost", unready_ends=ends)
    decision = RestartPolicy(plan_of(2)).decide(failed, [], 1000.0)

    assert (goes_on, goes_on) == (decision.restart, decision.entry is not None)
    assert goes_on or decision.reason == "it ended in the same way each time"


def test_numbers_do_not_tell_the_ends_of_agents_apart() -> None:
    """Process ids and ports differ each time; an end that was not the agent's own doing says nothing."""
    assert "ended: port # of process #" == unready_end(
        "ended: port 81 of process 4711", is_its_own_doing=True
    )
    assert "" == unready_end("was killed by SIGKILL", is_its_own_doing=False)
