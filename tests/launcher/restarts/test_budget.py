from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.compiler.plan.launch_plan import RestartPlan
from elasticflow.launcher.restarts.budget import FREE, FREE_AGENTS, LONGEST_DELAY_S, Budget
from elasticflow.launcher.restarts.failures import CLASSES
from elasticflow.launcher.restarts.restart_ledger import read_ledger


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


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
    budget = Budget(plan_of(2), ledger, Clock())
    decisions = [budget.charge("crash", step=step) for step in (10, 20, 30)]
    assert [d.restart for d in decisions] == [True, True, False]
    assert [d.left for d in decisions] == [1, 0, 0]
    assert [d.spent for d in decisions] == [False, False, True]
    assert decisions[-1].reason == "3 failures, restarts.budget is 2"


def test_a_budget_of_zero_allows_no_restart(ledger: Path) -> None:
    """With budget 0 the first failure ends the run, and the reason says why."""
    decision = Budget(plan_of(0), ledger, Clock()).charge("crash", step=10)
    assert (decision.restart, decision.spent, decision.reason) == (False, True, "restarts.budget is 0")


@pytest.mark.parametrize("name", sorted(FREE))
def test_what_nobody_is_to_blame_for_is_free(ledger: Path, name: str) -> None:
    """Resizes, drains, preemptions and a dead agent leave the budget as it is, even an empty one."""
    budget = Budget(plan_of(0), ledger, Clock())
    decision = budget.charge(name, step=10)
    assert (decision.restart, decision.charged, decision.reason) == (True, False, "free of charge")
    assert not budget.entries[-1].charged


def test_an_agent_that_keeps_dying_is_charged(ledger: Path) -> None:
    """A dead agent is free, but not for ever: without a finished step the next one costs."""
    budget = Budget(plan_of(0), ledger, Clock())
    decisions = [budget.charge("agent_lost", step=10) for _ in range(FREE_AGENTS + 1)]
    assert [d.charged for d in decisions] == [False] * FREE_AGENTS + [True]
    assert decisions[-1].spent


def test_first_restart_has_no_delay_and_delays_grow_without_progress(ledger: Path) -> None:
    """The delay doubles while the same step is never passed, up to a minute, and progress resets it."""
    budget = Budget(plan_of(100), ledger, Clock())
    delays = [budget.charge("crash", step=10).delay_s for _ in range(9)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert budget.charge("crash", step=11).delay_s == 0.0
    assert budget.charge("crash", step=5).delay_s == 1.0, "below the highest step there is no progress"


def test_a_resize_is_never_delayed(ledger: Path) -> None:
    """Failures without progress do not delay a resize or a drain that follows them."""
    budget = Budget(plan_of(9), ledger, Clock())
    budget.charge("crash", step=10)
    budget.charge("crash", step=10)
    assert budget.charge("resized", step=10).delay_s == 0.0


def test_a_user_error_while_building_ends_the_run_at_once(ledger: Path) -> None:
    """Before a first step the same code would fail again, so no restart is tried and none is said to be spent."""
    decision = Budget(plan_of(5), ledger, Clock()).charge("user_error", step=None, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "an error before the first step would come again"


def test_a_refusal_that_another_try_would_meet_again_ends_the_run_at_once(ledger: Path) -> None:
    """At whatever step it came, and with a full budget; where an older snapshot may fare better that one is tried."""
    budget = Budget(plan_of(5), ledger, Clock())
    decision = budget.charge("user_error", step=10, fingerprint="a", is_final=True)
    assert (decision.restart, decision.spent, decision.left) == (False, False, 4)
    assert decision.reason == "what the job was refused for would be refused again"
    assert budget.charge(
        "user_error", step=None, fingerprint="a", is_final=True, retry_advice="retry"
    ).restart


def test_the_same_user_error_twice_without_progress_ends_the_run(ledger: Path) -> None:
    """Once may be chance; the same error at the same step is not."""
    budget = Budget(plan_of(5), ledger, Clock())
    assert budget.charge("user_error", step=10, fingerprint="a").restart
    decision = budget.charge("user_error", step=10, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "the same error came again without progress"


def test_replicas_that_go_apart_in_the_same_way_again_end_the_run(ledger: Path) -> None:
    """A memory cell fails anywhere; code that writes by rank does it to the same tensor, before any progress."""
    budget = Budget(plan_of(5), ledger, Clock())
    assert budget.charge("diverged", step=10, fingerprint="a").restart
    assert budget.charge("diverged", step=10, fingerprint="b").restart
    decision = budget.charge("diverged", step=10, fingerprint="a")
    assert (decision.restart, decision.spent) == (False, False)
    assert decision.reason == "the replicas went apart in the same way again, without progress"


def test_another_user_error_or_progress_in_between_allows_a_restart(ledger: Path) -> None:
    """Two different errors, or the same one further on, are two accidents."""
    budget = Budget(plan_of(5), ledger, Clock())
    assert budget.charge("user_error", step=10, fingerprint="a").restart
    assert budget.charge("user_error", step=10, fingerprint="b").restart
    assert budget.charge("user_error", step=11, fingerprint="a").restart


def test_whoever_knows_more_than_the_ledger_says_whether_there_is_hope(ledger: Path) -> None:
    """An error that came before may stay away next time, and a new one may be without hope; it is charged either way."""
    budget = Budget(plan_of(5), ledger, Clock())
    again = [budget.charge("user_error", step=None, fingerprint="a", retry_advice="retry") for _ in range(3)]
    assert [(d.restart, d.left) for d in again] == [(True, 4), (True, 3), (True, 2)]
    last = budget.charge("user_error", step=10, fingerprint="b", retry_advice="hopeless")
    assert (last.restart, last.spent, last.left) == (False, False, 1)
    assert last.reason == "the same error came again without progress"


def test_a_loss_that_is_not_finite_at_the_same_step_again_ends_the_run(ledger: Path) -> None:
    """Training is deterministic, so the second time at one step is the proof that it stays so."""
    budget = Budget(plan_of(5), ledger, Clock())
    assert budget.charge("nonfinite", step=10).restart
    assert budget.charge("nonfinite", step=12).restart
    decision = budget.charge("nonfinite", step=12)
    assert (decision.restart, decision.reason) == (False, "the loss was not finite at the same step again")


def test_peer_counts_as_a_crash(ledger: Path) -> None:
    """An error of a collective without any other cause is charged under a class that exists for budgets."""
    budget = Budget(plan_of(5), ledger, Clock())
    budget.charge("peer", step=10)
    assert budget.entries[-1].failure_class == "crash"


def test_time_refills(ledger: Path) -> None:
    """After the window's seconds a failure no longer counts, and the decision says that the budget was full."""
    clock = Clock()
    budget = Budget(plan_of(1, seconds=3600), ledger, clock)
    assert budget.charge("crash", step=10).left == 0
    clock.now += 3599
    assert budget.left() == 0
    clock.now += 1
    assert budget.left() == 1
    decision = budget.charge("crash", step=20)
    assert (decision.restart, decision.refilled, decision.left) == (True, True, 0)
    assert not budget.charge("crash", step=30).restart


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_progress_refills(ledger: Path, unit: str) -> None:
    """Steps or epochs beyond the failure take it out of the window; doing lost steps again does not."""
    budget = Budget(plan_of(1, steps=100) if unit == "steps" else plan_of(1, epochs=100), ledger, Clock())
    budget.charge("crash", step=50, epoch=50)
    assert budget.left(step=149, epoch=149) == 0
    assert budget.left(step=150, epoch=150) == 1
    assert budget.charge("crash", step=150, epoch=150).refilled
    assert budget.left(step=60, epoch=60) == 0


def test_the_next_launch_counts_on(ledger: Path) -> None:
    """The ledger file is the budget's only memory, so a resumed run has what is left."""
    Budget(plan_of(2), ledger, Clock()).charge("crash", step=10, generation=3, fingerprint="f", epoch=1)
    budget = Budget(plan_of(2), ledger, Clock())
    assert budget.left() == 1
    entry = budget.entries[0]
    assert (
        entry.failure_class, entry.step, entry.epoch, entry.generation, entry.fingerprint, entry.charged,
    ) == ("crash", 10, 1, 3, "f", True)  # fmt: skip


def test_a_torn_line_loses_only_itself(ledger: Path) -> None:
    """A ledger cut in the middle of a line by a crash is read, and the next entry starts a line of its own."""
    Budget(plan_of(9), ledger, Clock()).charge("crash", step=10)
    with ledger.open("a") as file:
        file.write('{"time": 1.0, "cl')
    Budget(plan_of(9), ledger, Clock()).charge("hang", step=20)
    assert [e.failure_class for e in read_ledger(ledger)] == ["crash", "hang"]


def test_no_ledger_is_an_empty_one(ledger: Path) -> None:
    """A run that never failed has no ledger file and a full budget."""
    assert read_ledger(ledger) == []
    assert Budget(plan_of(3), ledger, Clock()).left() == 3
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
    clock = Clock()
    with TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        budget = Budget(plan, ledger, clock)
        for name, step, pause, fingerprint in charges:
            clock.now += pause
            before = budget.left(step)
            decision = budget.charge(name, step=step, fingerprint=fingerprint)
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
        assert Budget(plan, ledger, clock).entries == budget.entries
