"""Snapshots that starts fail from: set aside at the second, cleared when an older one fails alike. No process runs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow import errors, events
from elasticflow.launcher.agent.agent_process import AgentEnd
from elasticflow.run_folder import snapshot_name
from tests.launcher.lifecycle_trial import worker

if TYPE_CHECKING:
    from tests.launcher.lifecycle_trial import Trial

RAISED = 'Traceback (most recent call last):\n  File "train.py"\nValueError: no weight may be {}\n'


@pytest.fixture
def trial(trial: Trial) -> Trial:
    """Return a lifecycle with two snapshots and plenty of restarts, about to form its first generation."""
    trial.plan(budget=9)
    trial.snapshots.names = [name_of(10), name_of(5)]
    trial.join()
    return trial


def name_of(step: int, generation: int = 1) -> str:
    """Return the name of the snapshot at *step*."""
    return snapshot_name(step, generation, f"{step:08x}")


def start(trial: Trial) -> str:
    """Have the next generation formed and restored from the newest snapshot; return its name."""
    trial.wait(60)
    newest = trial.snapshots.usable()[0]
    trial.log(events.SNAPSHOT_CHOSEN, name=newest)
    assert newest == trial.generation.restored_from
    return newest


def fail(trial: Trial, how: str = "nan") -> None:
    """Have rank 1 raise an error that says *how*."""
    trial.fail(worker(0, -9, ended_by_us=True), worker(1, 1, stderr=RAISED.format(how)))


def crash(trial: Trial, number: int = signal.SIGSEGV) -> None:
    """Have rank 1 killed by a signal."""
    trial.fail(worker(0, -9, ended_by_us=True), worker(1, -number))


def verdicts(trial: Trial) -> list[tuple[str, str]]:
    """Return event and name of each snapshot set aside or cleared."""
    kinds = (events.SNAPSHOT_REJECTED, events.SNAPSHOT_CLEARED)
    return [(record["event"], record["name"]) for record in trial.records if record["event"] in kinds]


def test_second_failed_start_sets_the_snapshot_aside(trial: Trial) -> None:
    """An error before the first step ends no run that has older snapshots: the third start is from one of them."""
    for _ in range(2):
        assert name_of(10) == start(trial)
        fail(trial)

    assert name_of(5) == start(trial)
    [rejected] = [r for r in trial.records if r["event"] == events.SNAPSHOT_REJECTED]
    cause = "user_error: ValueError: no weight may be nan"
    assert f"two starts from it failed before a step was finished: {cause}" == rejected["reason"]
    assert {name_of(10): rejected["reason"]} == trial.snapshots.set_aside
    assert [8, 7] == [r["left"] for r in trial.records if r["event"] == events.BUDGET_CHARGED]


def test_older_snapshot_that_trains_on_proves_it(trial: Trial) -> None:
    """Past the step of the one set aside the case is closed: the same error later on is an error of its own."""
    for _ in range(2):
        start(trial)
        fail(trial)
    start(trial)
    trial.step(11)
    fail(trial)
    trial.wait(60)

    assert [(events.SNAPSHOT_REJECTED, name_of(10))] == verdicts(trial)
    assert trial.lifecycle.verdict is None
    assert [name_of(10)] == list(trial.snapshots.set_aside)


@pytest.mark.parametrize("reached", [None, 7, 10])
def test_same_error_from_an_older_one_clears_it(trial: Trial, reached: int | None) -> None:
    """It came again at the start or on the way to the same step: the run ends as ever, the newest snapshot is good."""
    for _ in range(2):
        start(trial)
        fail(trial)
    start(trial)
    if reached is not None:
        trial.step(reached)
    fail(trial)

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert [(events.SNAPSHOT_REJECTED, name_of(10)), (events.SNAPSHOT_CLEARED, name_of(10))] == verdicts(
        trial
    )
    assert name_of(10) == trial.snapshots.usable()[0]


def test_another_error_from_an_older_one_clears_it_with_the_verdict(trial: Trial) -> None:
    """The oldest has nothing to go back to: the run ends, and nothing was proved against the newest."""
    for how in ("nan", "nan", "inf"):
        start(trial)
        fail(trial, how)

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert {} == trial.snapshots.set_aside


def test_older_ones_are_tried_in_turn(trial: Trial) -> None:
    """Two starts from the older one fail with another error: it is set aside as well."""
    trial.snapshots.names.append(name_of(2))
    for how in ("nan", "nan", "inf", "inf"):
        start(trial)
        fail(trial, how)

    assert name_of(2) == start(trial)
    assert {name_of(5), name_of(10)} == set(trial.snapshots.set_aside)


def test_only_snapshot_is_not_blamed(trial: Trial) -> None:
    """With nothing older an error before the first step ends the run at once, as it does without snapshots."""
    trial.snapshots.names.remove(name_of(5))
    start(trial)
    fail(trial)

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert [] == verdicts(trial)


def test_error_before_a_snapshot_was_chosen_ends_the_run(trial: Trial) -> None:
    """A model that cannot be built has nothing to do with snapshots."""
    trial.pass_time()
    fail(trial)

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert [] == verdicts(trial)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS])
def test_crashes_count(trial: Trial, number: int) -> None:
    """A signal that a program brings upon itself; it is cleared after the same one, and the run continues as ever."""
    for _ in range(2):
        start(trial)
        crash(trial, number)
    assert name_of(5) == start(trial)
    crash(trial, number)

    assert name_of(10) == start(trial)
    for _ in range(2):
        crash(trial, number)
        assert name_of(10) == start(trial)
    assert 2 == len(verdicts(trial))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_being_killed_is_nobodys_fault(trial: Trial, number: int) -> None:
    """Killed from outside at every start: nothing is set aside."""
    for _ in range(4):
        assert name_of(10) == start(trial)
        crash(trial, number)

    assert [] == verdicts(trial)


def test_interruption_between_two_failed_starts_says_nothing(trial: Trial) -> None:
    """A worker killed and an agent lost in between: the row of failed starts continues."""
    start(trial)
    fail(trial)
    start(trial)
    crash(trial, signal.SIGKILL)
    start(trial)
    trial.agent_died("n0", AgentEnd(-9))
    trial.join()
    start(trial)
    fail(trial)

    assert [(events.SNAPSHOT_REJECTED, name_of(10))] == verdicts(trial)


def test_a_finished_step_ends_the_row(trial: Trial) -> None:
    """A start that got somewhere speaks for the snapshot."""
    start(trial)
    crash(trial)
    start(trial)
    trial.step(11)
    crash(trial)
    start(trial)
    crash(trial)

    assert [] == verdicts(trial)


def test_spent_budget_sets_nothing_aside(trial: Trial) -> None:
    """No start follows that could prove anything: the newest snapshot stays good."""
    trial.plan(budget=1)
    trial.join()
    for _ in range(2):
        start(trial)
        fail(trial)

    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    assert [] == verdicts(trial)


def test_store_that_does_not_answer_blames_nobody(trial: Trial) -> None:
    """Without an answer whether there is an older one, the run ends as if there were none."""
    start(trial)
    trial.snapshots.answer = False
    fail(trial)

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert [] == verdicts(trial)
