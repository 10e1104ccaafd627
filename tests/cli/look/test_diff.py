"""`elasticflow diff`: two runs, or a run and a job file, side by side."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.origins import Made, origins_now
from elasticflow.jobfile.load import require_job
from elasticflow.launcher.resume_check import record_job
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path

JOB = """\
[job]
name = "small"
[model]
entry = "pieces:Net"
loss = "pieces:loss"
[optimizer]
entry = "pieces:optimizer"
args = { lr = 0.1 }
[dataset]
entry = "pieces:digits"
args = { source = "https://me:hidden@host/data" }
global_batch_size = 8
[train]
epochs = 2
"""
PIECES = """\
class Net(object): ...
def loss(outputs, targets): ...
def optimizer(parameters, lr): ...
def digits(source): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a job file, being the working folder."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "small.toml").write_text(JOB)
    (tmp_path / "pieces.py").write_text(PIECES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _launched(project: Path, run_id: str, *overrides: str) -> RunFolder:
    """Return a run whose launch folder is written and whose workers have reported."""
    loaded = require_job(project / "small.toml", overrides)
    folder = RunFolder.of(project, "small", run_id)
    plan = plan_job(loaded.job, project_root=project, job_files=loaded.files)
    made = Made(loaded.job, origins_now(loaded.job, project, plan.job_files, run_id))
    materialize(
        folder.launch(1),
        launch_files(plan, loaded.job, folder.launch(1), project_root=project, origins=made.origins),
    )
    record_job(folder, Catalog(Storage(str(folder.path)), ""), plan, made)
    data = {"train": {"samples": 80, "fingerprint": f"data of {run_id}"}}
    (folder.launch(1) / "environment.json").write_text(json.dumps({"datasets": data}))
    state = {"status": "finished", "step": 20, "loss": 0.25, "restarts": 1, "launch": 1}
    state["durations"] = {"run": {"training": 2.26}, "launch": {"training": 2.26}}
    folder.state.write_text(json.dumps(state))
    return folder


def test_a_run_and_its_job_file_are_equal(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing changed since: exit 0, and how the run went beside it."""
    _launched(project, "one")
    assert 0 == call(["diff", "one", "small.toml"])
    lines = capsys.readouterr().out.splitlines()
    assert ["from  small one", "to    small.toml"] == lines[:2]
    assert "  no difference in job, own code, versions, machine and data" in lines
    assert ["  loss         0.2500    -", "  restarts     1         -"] == lines[-2:]


def test_two_runs_that_differ(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Job, code, data and results, without a word about continuing; the text of what changed; passwords are hidden."""
    _launched(project, "one")
    (project / "pieces.py").write_text(
        PIECES.replace("class Net(object): ...", "class Net(object):\n    fixed = True")
    )
    _launched(project, "two", "optimizer.args.lr=0.2", 'dataset.args.source="https://me:other@host/new"')
    assert 1 == call(["diff", "one", "two", "--sources"])
    out = capsys.readouterr().out
    assert "would corrupt" not in out
    heads = [line for line in out.splitlines() if line in {"  job", "  code", "  data", "  environment"}]
    assert ["  job", "  code", "  data"] == heads
    assert re.search(r"^  data\n    data.train +data of one", out, re.MULTILINE)
    assert re.search(r"^  took +2.3 s +2.3 s$", out, re.MULTILINE)
    assert "optimizer.args.lr" in out
    assert "https://me:***@host/data -> https://me:***@host/new" in out
    assert "hidden" not in out
    assert "--- small one: pieces.py\n+++ small two: pieces.py\n" in out
    assert "+    fixed = True\n" in out
    assert "\x1b" not in out


def test_differences_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a program reads: both sides, and each difference with its weight."""
    _launched(project, "one")
    assert 1 == call(["diff", "one", "small.toml", "--set", "train.epochs=3", "--format", "json"])
    facts = json.loads(capsys.readouterr().out)
    assert not facts["equal"]
    assert [("train.epochs", 2, 3, "harmless")] == [
        (each["key"], each["old"], each["new"], each["weight"]) for each in facts["differences"]
    ]
    assert (20, None) == (facts["old"]["outcome"]["steps"], facts["new"]["outcome"])
    assert {"pieces.py", "small.toml"} == set(facts["new"]["sources"])


def test_a_store_that_cannot_be_read(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It wants credentials, for instance: a sentence, not a traceback."""

    def refuse(_: Catalog) -> None:
        raise PermissionError("NoCredentialsError: Unable to locate credentials")

    monkeypatch.setattr(Catalog, "read_job_record", refuse)
    assert 2 == call(["diff", f"file://{project}", "small.toml"])
    assert "cannot be read: NoCredentialsError: " in capsys.readouterr().err


def test_a_run_that_is_known_by_its_snapshots_only(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JOB.json at a URI tells the job and what it was made from."""
    folder = _launched(project, "one")
    assert 0 == call(["diff", f"file://{folder.path}", "small.toml"])
    assert 1 == call(["diff", "small.toml", f"file://{folder.path}", "--set", "job.seed=3"])
    assert "job.seed  3 -> 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["one", "nobody"], 'no run "nobody"'),
        (["file:///nowhere", "one"], "there is no JOB.json at file:///nowhere"),
        (["one", "one", "--set", "train.epochs=3"], "--set and --case are about a job file"),
        (["one", "broken.toml"], "EF"),
        (["one", "empty"], "was never launched"),
    ],
)
def test_what_cannot_be_compared(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """Exit 2, with the reason: no such run, no record, no valid job."""
    _launched(project, "one")
    (project / "broken.toml").write_text("[job]\n")
    RunFolder.of(project, "small", "empty").launches.mkdir(parents=True)
    assert 2 == call(["diff", *words])
    assert told in capsys.readouterr().err
