"""Fault plans: what they say, what is refused and where; what each fault cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticflow.errors import FaultPlanError, TrialRefusedError
from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
from elasticflow.observe.history import RunHistory
from elasticflow.protocol.trajectory_record import Record
from elasticflow.trials import compare_runs
from elasticflow.trials.chaos import costs, without_late_faults
from elasticflow.trials.faults import (
    KINDS,
    DoneFault,
    Fault,
    FaultPlan,
    draw_plan,
    fault_variable,
    read_plan,
    scale,
)

SHIPPED = sorted((Path(__file__).parents[2] / "examples" / "faults").glob("*.toml"))


def test_shipped_plans_fit_in_thirty_steps_and_show_every_kind() -> None:
    """Whoever looks for what can be done finds it in one of them."""
    plans = [read_plan(path, 30) for path in SHIPPED]
    assert KINDS.keys() == {fault.what for plan in plans for fault in plan.faults}


@pytest.mark.parametrize(
    ("text", "place", "reason", "remedy"),
    [
        ("", "", "a plan has at least one [[faults]]", "`step` and `what`"),
        ("[[faults]\n", ":1:9", "not valid TOML", None),
        ("x = 1\n", ":1:1", "`x` is no key of a fault plan", "`nodes` and [[faults]]"),
        ("nodes = 0\n", ":1:1", "`nodes` is 0: must be a whole number from 1 to 64", None),
        ('[[faults]]\nwhat = "kill"\n', ":1:3", "`step` is missing", "finished steps"),
        ('[[faults]]\nstep = 40\nwhat = "kill"\n', ":2:1", "must be a whole number from 1 to 28", "--steps"),
        ('[[faults]]\nstep = 4.0\nwhat = "kill"\n', ":2:1", "`step` is 4.0: must be a whole number from 1 to 28", None),
        ('[[faults]]\nstep = 4\nwhat = "kil"\n', ":3:1", "`what` is 'kil', which is no fault", "there are kill, stop"),
        ('[[faults]]\nstep = 4\nwhat = "kill"\nwhom = 1\n', ":4:1", "`whom` is no key of a fault", "rank"),
        ('[[faults]]\nstep = 4\nwhat = "join"\nrank = 1\n', ":4:1", '"join" has no `rank`', "take it out"),
        ('[[faults]]\nstep = 4\nwhat = "leave"\n', ":1:3", "no node is left", "raise `nodes`"),
        ('[[faults]]\nstep = 4\nwhat = "at-point"\npoint = "commit.tol"\n', ":4:1", "no fault point", "commit.told"),
        ('[[faults]]\nstep = 4\nwhat = "at-point"\npoint = "commit.told"\nact = "burn"\n', ":5:1", "`act` is 'burn'", "stall:SECONDS"),
        ('[[faults]]\nstep = 4\nwhat = "at-point"\npoint = "commit.told"\nact = "raise:ENOSUCH"\n', ":5:1", "`act` is 'raise:ENOSUCH'", "raise:ERRNO"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_done_is_refused(
    tmp_path: Path, text: str, place: str, reason: str, remedy: str | None
) -> None:
    """File, line and column, the reason, and what to do."""
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(FaultPlanError) as caught:
        read_plan(path, 30)
    assert caught.value.message.startswith(f"{path}{place}: ")
    assert reason in caught.value.message
    assert remedy is None or remedy in str(caught.value.remedy)


def test_a_plan_that_is_missing_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """The path stands in the message once."""
    with pytest.raises(FaultPlanError, match=r"^no such file: ") as refused:
        read_plan(tmp_path / "gone.toml", 30)
    assert "examples/faults" in (refused.value.remedy or "")


def test_faults_behind_the_jobs_end_are_left_out_and_a_plan_of_such_faults_is_refused() -> None:
    """A job of few epochs is shorter than --steps, which only the undisturbed run shows."""
    early, late = Fault(4, "kill"), Fault(40, "kill")
    assert without_late_faults(FaultPlan("two", (early, late)), 24).faults == (early,)
    with pytest.raises(TrialRefusedError, match="ends after 24 steps, before the first fault"):
        without_late_faults(FaultPlan("late", (late,)), 24)
    assert costs((), RunHistory.of([]), ()) == ()


def test_a_seed_gives_the_same_faults_again() -> None:
    """All of them at steps that the run has; a single worker has no replica to differ from."""
    plan = draw_plan(200, 7, 30, 1)
    assert plan == draw_plan(200, 7, 30, 1) != draw_plan(200, 8, 30, 1)
    assert list(range(1, 29)) == sorted({fault.step for fault in plan.faults})
    assert "flip" not in {fault.what for fault in plan.faults}
    assert "flip" in {fault.what for fault in draw_plan(200, 7, 30, 2).faults}


def test_what_the_processes_of_a_run_are_told(tmp_path: Path) -> None:
    """Faults inside of them wait for their cue, nodes come and go on theirs."""
    faults = (
        Fault(2, "kill"),
        Fault(3, "flip", 1),
        Fault(4, "join"),
        Fault(5, "at-point", point="commit.told", act="stall:1"),
        Fault(6, "kill-node"),
    )
    plan = FaultPlan("plan", faults, nodes=2)
    flip, late = (f"cue={tmp_path}/cue-{number}" for number in (1, 3))
    assert f"training.step=flip rank=1 {flip}, commit.told=stall:1 {late}" == fault_variable(plan, tmp_path)
    joins = ScaleChange(0.0, 3, by_force=False, cue=tmp_path / "cue-2")
    ends = ScaleChange(0.0, 2, by_force=True, cue=tmp_path / "cue-4")
    assert (ScaleChange(0.0, 2), joins, ends) == scale(plan, tmp_path)
    assert (3, 2) == (plan.most_nodes, plan.least_nodes)
    assert not joins.is_due(1)
    (tmp_path / "cue-2").touch()
    assert joins.is_due(1)


def at(second: int, event: str, **fields: Any) -> dict[str, Any]:
    """Return an event of a run."""
    return {"timestamp": f"1970-01-01T00:00:{second:02d}+00:00", "event": event, **fields}


def test_a_fault_costs_what_happens_up_to_the_next_one() -> None:
    """Restarts by class, seconds, steps; neither how the run began nor how it ended counts."""
    done = [
        DoneFault(Fault(1, "join"), 1, 3.0),
        DoneFault(Fault(4, "kill", 1), 1, 10.0),
        DoneFault(Fault(9, "flip"), 2, 20.0),
        DoneFault(Fault(9, "full-disk"), 2, 30.0),
    ]
    happened = [
        at(2, "training.first_step", generation=1),
        at(5, "drain.requested", generation=1),
        at(6, "generation.ended", **{"class": "resized"}, generation=1),
        at(7, "training.first_step", generation=2),
        at(11, "generation.ended", **{"class": "crash"}, generation=2),
        at(13, "training.first_step", generation=3),
        at(21, "training.first_step", generation=3),
        at(31, "snapshot.failed", generation=3),
        at(40, "generation.ended", **{"class": "drained"}, generation=3),
    ]
    done_by = {1: range(3), 2: range(2, 6), 3: range(3, 31)}
    records = [
        Record(step, 8 * step, None if step == steps[0] else 1.0, generation, 2, {})
        for generation, steps in done_by.items()
        for step in steps
    ]
    join, kill, flip, full = costs(done, RunHistory.of(happened), records)
    assert (("resized",), 2.0, 0, 0) == (join.restarts, join.seconds, join.redone, join.snapshots)
    assert (("crash",), 3.0, 2, 0) == (kill.restarts, kill.seconds, kill.redone, kill.snapshots)
    assert ((), None, 0, 0) == (flip.restarts, flip.seconds, flip.redone, flip.snapshots)
    assert ((), None, 0, 1) == (full.restarts, full.seconds, full.redone, full.snapshots)
    words = ("kill -9 of rank 1", "a bit of a parameter flipped on rank 2", "a write fails: no space left")
    assert words == (kill.words, flip.words, full.words)
    assert 2 == compare_runs.redone(records)


def test_what_a_run_did_not_go_on_from_does_not_count() -> None:
    """A generation that was led astray is forgotten from where the next one began."""

    def record(step: int, generation: int, loss: float | None = 1.0) -> Record:
        return Record(step, 8 * step, loss, generation, 2, {})

    first = [record(0, 1, None), record(1, 1), record(2, 1), record(3, 1)]
    second = [record(1, 2, None), record(2, 2), record(3, 2)]
    assert [*first[:2], *second] == compare_runs.without_lost_steps([*first, *second])
    assert 2 == compare_runs.redone([*first, *second])
