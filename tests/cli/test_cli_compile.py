from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.cli.main import call
from elasticflow.compiler.materialize import read_job

ROOT = Path(__file__).resolve().parents[2]
JOB = """\
[job]
name = "small"
[model]
entry = "pieces:net"
loss = "pieces:loss"
[optimizer]
entry = "pieces:optimizer"
args = { lr = 0.1 }
[dataset]
entry = "pieces:Data"
global_batch_size = 8
[evaluation]
entry = "pieces:Data"
metrics = { accuracy = "pieces:loss" }
[train]
epochs = 3
[nodes]
max = 2
nproc_per_node = 2
endpoint = "head:29400"
[restarts]
refill = "1 h"
"""
PIECES = """\
def net(): ...
def loss(a, b): ...
def optimizer(params, lr): ...
class Data:
    def __len__(self): ...
    def __getitem__(self, i): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one job, being the working folder."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "small.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compile_says_what_it_wrote_and_how_to_run_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compile writes the folder, exits 0 and tells the two ways to run it by hand."""
    assert call(["compile", "small.toml", "-o", "out"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote out: train.py, torchrun.sh, torchrun.args, plan.json, job.json, sources/",
        "  several workers: bash out/torchrun.sh",
        "  one process:     python out/train.py",
    ]
    assert read_job(project / "out").job.name == "small"


def test_compile_applies_overrides(project: Path) -> None:
    """--set changes the job that is compiled."""
    assert call(["compile", "small.toml", "-o", "out", "--set", "train.epochs=9", "--set", "job.seed=4"]) == 0
    job = read_job(project / "out")
    assert (job.train.epochs, job.job.seed) == (9, 4)


def test_compile_keeps_an_edited_entry_point(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An edited train.py is refused with exit code 2, and replaced by --force."""
    call(["compile", "small.toml", "-o", "out"])
    (project / "out" / "train.py").write_text("# mine\n")
    capsys.readouterr()
    assert call(["compile", "small.toml", "-o", "out"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: out: edited by hand since it was written: train.py",
        "help: --force replaces it; or write to another folder",
    ]
    assert call(["compile", "small.toml", "-o", "out", "--force"]) == 0
    assert (project / "out" / "train.py").read_text() != "# mine\n"


@pytest.mark.parametrize("command", [["compile", "-o", "out"], ["plan"]])
def test_a_job_with_errors_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Errors in the job file are shown as diagnostics; exit code 2, nothing is written."""
    (project / "small.toml").write_text(JOB.replace("epochs", "epoch"))
    assert call([command[0], "small.toml", *command[1:]]) == 2
    assert 'unknown key "epoch" in [train]' in capsys.readouterr().err
    assert not (project / "out").exists()


def test_an_argument_that_is_a_date_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A TOML date in args is refused with the key's name."""
    (project / "small.toml").write_text(JOB.replace("lr = 0.1", "lr = 2026-11-20"))
    assert call(["plan", "small.toml"]) == 2
    assert "args.lr" in capsys.readouterr().err


def test_plan_in_words(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan shows the split of the batch, the policies in words and the torchrun command."""
    assert call(["plan", "small.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("job          small (small.toml; digest ")
    assert lines[1:7] == [
        "nodes        1 to 2, 2 workers each, meeting at head:29400",
        "batch        8 samples per step, at every number of nodes",
        "steps        3 epochs; how many steps is known after the first run (or set dataset.samples)",
        "restarts     3 failures, full again after 1 h; no progress for 10 min is one, or for less once the run shows what is usual; resizes, drains and preemptions are free",
        "snapshots    every 10 min or 1 epoch, at the end and when asked to leave; in runs/small/<run id>; the last 3 stay",
        "evaluation   every 1 epoch and at the end: loss, accuracy",
    ]
    assert lines[8:11] == [
        "nodes  workers  samples each  forwards each  samples in one",
        "    1        2             4              1               4",
        "    2        4             2              1               2",
    ]
    assert "    --nnodes=1:2 \\" in lines
    assert any(line.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # ") for line in lines)


def test_plan_counts_steps_where_the_samples_are_known(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dataset.samples, or after a run that opened the data, the number of steps is known."""
    call(["plan", "small.toml", "--set", "dataset.samples=100"])
    assert (
        "steps        38: 3 epochs of 100 samples by 8, 12 or 13 each" in capsys.readouterr().out.splitlines()
    )
    _pretend_a_run(project)
    call(["plan", "small.toml"])
    assert "steps        19: 3 epochs of 50 samples by 8, 6 or 7 each" in capsys.readouterr().out.splitlines()


def test_plan_tells_what_exact_mode_costs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forwards, sums of gradients and traffic stand beside those of batch mode, and what they mean below."""
    exact = ["train.consistency=exact", "train.virtual_shards=8", "nodes.max=3", "nodes.nproc_per_node=1"]
    call(["plan", "small.toml", *(f"--set={each}" for each in exact)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[8:12] == [
        "nodes  workers  samples each  forwards each  samples in one  instead of  gradient sums  traffic",
        "    1        1             8              8               1           1              4     none",
        "    2        2             4              4               1           1              3        1",
        "    3        3        2 or 3              3               1           1              3      1.5",
    ]
    assert lines[13].startswith("exact: a batch is 8 virtual shards of 1 sample")


def test_plan_of_a_wide_range_has_formulas(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where not every number of nodes has a row, the rule stands below."""
    wide = ["nodes.max=4096", "nodes.nproc_per_node=1", "dataset.global_batch_size=4096"]
    call(["plan", "small.toml", *(f"--set={each}" for each in wide)])
    assert (
        "with W workers: each takes 4096 / W samples, rounded down or up"
        in capsys.readouterr().out.splitlines()
    )


def test_plan_tells_the_drift_since_the_last_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What changed since the newest run's launch is named with its weight."""
    _pretend_a_run(project)
    call(["plan", "small.toml"])
    assert "drift        none since run 20261120-120000-0000" in capsys.readouterr().out.splitlines()
    call(["plan", "small.toml", "--set", "job.seed=4"])
    lines = capsys.readouterr().out.splitlines()
    assert "drift        since run 20261120-120000-0000:" in lines
    assert any(line.strip().startswith("job.seed: 0 -> 4 (corrupting: ") for line in lines)


def test_plan_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--format json prints the plan's facts, steps and drift."""
    _pretend_a_run(project)
    capsys.readouterr()
    assert call(["plan", "small.toml", "--format", "json", "--set", "train.epochs=4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["job_name"], facts["nodes_max"], facts["samples"], facts["steps"]) == ("small", 2, 50, 25)
    assert (facts["steps_per_epoch"], facts["worlds"][1]["samples_per_rank"]) == ([6, 7], [2, 2])
    assert facts["drift"]["run_id"] == "20261120-120000-0000"
    assert [(d["key"], d["weight"]) for d in facts["drift"]["differences"]] == [("train.epochs", "harmless")]


@pytest.mark.usefixtures("real_processes")
def test_plan_and_compile_load_no_torch(project: Path) -> None:
    """Neither command loads torch, nor what only other commands need."""
    code = (
        "import sys\n"
        "from elasticflow.cli.main import call\n"
        "assert call(['plan', 'small.toml']) == 0\n"
        "assert call(['compile', 'small.toml', '-o', 'out']) == 0\n"
        "print('loaded:', *sorted({'torch', 'numpy', 'fsspec', 'structlog', 'pieces'} & set(sys.modules)))\n"
    )
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded:")


def _pretend_a_run(project: Path) -> None:
    """Write the folder of a run that opened 50 samples."""
    run = project / "runs" / "small" / "20261120-120000-0000"
    assert call(["compile", "small.toml", "-o", str(run / "launches" / "0001")]) == 0
    opened = {"event": "dataset.opened", "name": "train", "samples": 50, "timestamp": "2026-11-20T12:00:00Z"}
    (run / "events.jsonl").write_text(json.dumps(opened) + "\n")
