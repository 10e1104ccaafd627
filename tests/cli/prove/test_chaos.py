"""What `chaos` refuses before anything starts, and the table it shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.prove.trial_view import ChaosView
from elasticflow.jobfile.load import require_job
from elasticflow.run_folder import RunFolder
from elasticflow.trials.chaos import ChaosOutcome, FaultCost
from elasticflow.trials.compare_runs import Divergence, RunComparison
from elasticflow.trials.fault_plan import Fault, FaultPlan
from tests.cli.prove.test_verify_elastic import JOB, PIECES

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import Job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return the job of a project in which this process is."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "small.toml").write_text(JOB)
    (tmp_path / "plan.toml").write_text('[[faults]]\nstep = 70\nwhat = "kill"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("elasticflow.trials.verify_elastic.count_gpus", lambda: 0)
    loaded = require_job(Path("small.toml"), ())
    assert loaded.job is not None
    return loaded.job


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plan", "plan.toml", "--faults", "3"), "exclude each other"),
        (("--plan", "plan.toml"), "error: plan.toml:2:1: `step` is 70: must be a number from 1 to 48"),
        (("--plan", "none.toml"), "error: none.toml: "),
        (("--steps", "5"), "5 steps are too few"),
        (("--workers", "9"), "9 workers cannot share a batch of 4"),
        (("--keep", "my runs"), "has a blank or a comma"),
    ],
)  # fmt: skip
def test_nothing_starts_where_the_answer_is_known(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    """Exit code 2, and the reason on standard error."""
    assert 2 == call(["chaos", "small.toml", *options])
    assert said in capsys.readouterr().err


def test_the_table_says_what_each_fault_cost(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Restarts by class, seconds, steps; the answer; where both runs are if they differ."""
    kill, full = Fault(4, "kill", 1), Fault(9, "full-disk")
    plan = FaultPlan("plan.toml", (kill, full, Fault(11, "kill")))
    costs = (
        FaultCost(kill, kill.words(1), ("crash",), 0.5, 3),
        FaultCost(full, full.words(1), (), None, 0, snapshots=1),
    )
    outcome = ChaosOutcome(False, RunFolder(Path("x/runs/small/2-chaos")), 12, (2.0, 3.0), RunComparison(12, 3, None, distance=0.01), costs, 1)  # fmt: skip
    with ChaosView(job, plan, 2, 12, 0.05, quiet=False) as view:
        view.conclude(outcome, None)
    assert [
        "small: 12 steps with 2 workers and 3 faults (plan.toml)",
        "",
        "STEP  WHAT WAS DONE                 RESTARTS               LOST    DONE AGAIN",
        "4     kill -9 of rank 1             crash                  0.50 s  3",
        "9     a write fails: no space left  none, 1 snapshot lost",
        "1 fault not done: the run had ended",
        "",
        "12 steps in 3.00 s, undisturbed in 2.00 s, 3 steps done again",
        "same: every sample once in 12 steps, and the smoothed losses are at most 1 % apart",
    ] == capsys.readouterr().out.splitlines()

    different = RunComparison(12, 3, Divergence(7, "loss", "1", "2"))
    view.conclude(ChaosOutcome(False, outcome.run, 12, outcome.seconds, different, costs, 0), Path("x"))
    assert [
        "different: step 7: loss is 2, was 1 in the reference",
        "both runs are in x; the disturbed one: elasticflow why x/runs/small/2-chaos",
    ] == capsys.readouterr().out.splitlines()[-2:]
