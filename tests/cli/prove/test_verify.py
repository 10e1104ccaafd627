"""What `verify` refuses before anything starts, and the words of what it finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.prove import trial_view
from elasticflow.jobfile.load import require_job
from elasticflow.run_folder import RunFolder
from elasticflow.trials.chaos import ChaosOutcome, FaultCost
from elasticflow.trials.compare_runs import Divergence, RunComparison
from elasticflow.trials.faults import Fault, FaultPlan

JOB = """\
[job]
name = "small"
[model]
entry = "pieces:net"
step = "pieces:step"
[optimizer]
entry = "pieces:optimizer"
[dataset]
entry = "pieces:Data"
global_batch_size = 4
[train]
epochs = 3
"""
PIECES = """\
def net(): ...
def step(model, batch): ...
def optimizer(params): ...
class Data:
    def __len__(self): ...
    def __getitem__(self, i): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project in which this process is."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "small.toml").write_text(JOB)
    (tmp_path / "plan.toml").write_text('[[faults]]\nstep = 70\nwhat = "kill"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("elasticflow.trials.verify_elastic.count_gpus", lambda: 0)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "said"),
    [
                (("--worlds", ""), "is not a list of world sizes"),
        (("--worlds", "1,,2"), "is not a list of world sizes"),
        (("--worlds", "0,1"), "is not a list of world sizes"),
        (("--worlds", "-1"), "is not a list of world sizes"),
        (("--worlds", "1,2000"), "each from 1 to 1024"),
        (("--worlds", "2", "--shards", "0"), "is not a list of degrees"),
        (("--worlds", "2", "--shards", "1,3"), "--shards 3 does not divide 2 workers"),
        (("--worlds", "1,5"), "5 workers cannot share a batch of 4"),
        (("--worlds", "1,2", "--steps", "5"), "5 steps are too few"),
        (("--worlds", "1,2", "--steps", "0"), "--steps"),
        (("--worlds", "1,2", "--tolerance", "0"), "--tolerance"),
        (("--worlds", "1,3", "--set=train.consistency=exact", "--set=train.virtual_shards=2"), "3 workers cannot share 2 virtual shards"),
        (("--worlds", "1,2", "--set=train.epoch=3"), "EF"),
        (("--worlds", "1,2", "--keep", "small.toml"), "is a file"),
        (("--faults", "3", "--worlds", "1,2"), "--worlds does not go with --faults"),
        (("--worlds", "1,2", "--seed", "3"), "--seed goes with --faults"),
        (("--faults", "0"), "0 is not in the range 1<=x<=1000"),
        (("--faults", "plan.toml"), "error: plan.toml:2:1: `step` is 70: must be a whole number from 1 to 48"),
        (("--faults", "none.toml"), "error: no such file: none.toml"),
        (("--faults", "3", "--steps", "5"), "5 steps are too few"),
        (("--faults", "3", "--workers", "9"), "9 workers cannot share a batch of 4"),
        (("--worlds", "1,2", "--keep", "small.toml/below"), "cannot make a folder for the trials"),
    ],
)  # fmt: skip
def test_nothing_starts_where_the_answer_is_known(
    project: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    """Exit code 2, the reason on standard error, nothing written."""
    before = sorted(project.rglob("*"))

    assert 2 == call(["verify", "small.toml", *options])

    shown = capsys.readouterr()
    assert ("", True) == (shown.out, said in " ".join(shown.err.split()))
    assert before == sorted(project.rglob("*"))


def test_the_command_does_without_torch(project: Path, real_processes: None) -> None:
    """Up to where the trials start, each in a process of its own."""
    code = (
        "import sys; from elasticflow.cli.main import call; "
        "import elasticflow.trials.verify_elastic, elasticflow.cli.prove.trial_view; "
        "code = call(['verify', 'small.toml', '--worlds', '9']); "
        "sys.exit(3 if 'torch' in sys.modules else code)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False
    )

    assert 2 == found.returncode, found.stderr


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (Divergence(7, "model/a", "1b", "2c", 31, 1), "step 7: model/a is 2c, was 1b in the reference; 31 more differ there"),
        (Divergence(0, "model/a", "1b", "2c", 0, 1, is_start=True), "before the first step: model/a is 2c, was 1b in the reference"),
        (Divergence(5, "model/a", "1b", None, 0, 2, is_start=True), "where generation 2 continued, at step 5: model/a is missing, was 1b in the reference"),
        (Divergence(7, "model/a", "1b", "2c", 0, 2, is_redone=True), "step 7, done again: model/a is 2c, was 1b in the reference"),
        (Divergence(7, "step", "done", None), "step 7: never done"),
    ],
)  # fmt: skip
def test_a_difference_in_words(difference: Divergence, said: str) -> None:
    """Step, tensor, both values, and what else is wrong there."""
    assert said == trial_view.where(difference)


@pytest.mark.usefixtures("project")
def test_no_process_starts_in_a_folder_that_torchrun_cannot_be_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, and the reason."""
    assert 2 == call(["verify", "small.toml", "--faults", "3", "--keep", "my runs"])
    assert "has a blank or a comma" in capsys.readouterr().err


def test_the_table_says_what_each_fault_cost(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Restarts by class, seconds, steps; the answer; where both runs are if they differ."""
    job = require_job(project / "small.toml", ()).job
    assert job is not None
    kill, full = Fault(4, "kill", 1), Fault(9, "full-disk")
    plan = FaultPlan("plan.toml", (kill, full, Fault(11, "kill")))
    costs = (
        FaultCost(kill, kill.words(1), ("crash",), 0.5, 3),
        FaultCost(full, full.words(1), (), None, 0, snapshots=1),
    )
    outcome = ChaosOutcome(False, RunFolder(Path("x/runs/small/2-chaos")), 12, (2.0, 3.0), RunComparison(12, 3, None, distance=0.01), costs, 1)  # fmt: skip
    with trial_view.ChaosView(job, plan, 2, 12, 0.05, quiet=False) as view:
        view.conclude(outcome, None)
    assert [
        "small: 12 steps with 2 workers and 3 faults (plan.toml)",
        "",
        "STEP  WHAT WAS DONE                 RESTARTS               LOST    DONE AGAIN",
        "4     kill -9 of rank 1             crash                  0.50 s  3",
        "9     a write fails: no space left  none, 1 snapshot lost",
        "1 fault not done: the run had ended",
        "",
        "12 steps in 3.0 s, undisturbed in 2.0 s, 3 steps done again",
        "same: every sample once in 12 steps, and the smoothed losses are at most 1 % apart",
    ] == capsys.readouterr().out.splitlines()

    different = RunComparison(12, 3, Divergence(7, "loss", "1", "2"))
    view.conclude(ChaosOutcome(False, outcome.run, 12, outcome.seconds, different, costs, 0), Path("x"))
    assert [
        "different: step 7: loss is 2, was 1 in the reference",
        "both runs are in x; the disturbed one: elasticflow why x/runs/small/2-chaos",
    ] == capsys.readouterr().out.splitlines()[-2:]
