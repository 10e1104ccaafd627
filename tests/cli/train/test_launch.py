"""What `run` and `resume` do around a launch; nothing is launched."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.train.resume import _request
from elasticflow.cli.train.view import _print_json
from elasticflow.compiler.launch_folder import LaunchRecord, launch_files, materialize, record_in
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.errors import NothingToResumeError
from elasticflow.run_folder import RunFolder

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
global_batch_size = 8
[evaluation]
entry = "pieces:Data"
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


def _project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (folder / "pyproject.toml").write_text("")
    (folder / "pieces.py").write_text(PIECES)
    (folder / "small.toml").write_text(JOB)
    monkeypatch.chdir(folder)
    return RunFolder.of(folder, "small", "x")


def test_run_folder_copied_out_of_its_project_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin without its code, and look for snapshots at a relative place elsewhere."""
    (tmp_path / "project").mkdir()
    folder = _project(tmp_path / "project", monkeypatch)
    assert call(["plan", "small.toml", "-o", str(folder.launch(1))]) == 0
    copied = tmp_path / "copied"
    shutil.copytree(folder.path, copied)

    with pytest.raises(NothingToResumeError, match="was the run folder copied or moved") as refused:
        _request(str(copied), (), accept_drift=False)
    assert "runs/small/copied" in (refused.value.remedy or "")


def test_finished_run_is_trained_on_by_a_greater_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says so, unless its own code, or a metric, has ended it."""
    folder = _project(tmp_path, monkeypatch)
    assert call(["plan", "small.toml", "-o", str(folder.launch(1))]) == 0
    folder.state.write_text('{"status": "finished"}')

    for overrides in [(), ("job.seed=2",), ("train.epochs=3",), ("train.epochs=2",)]:
        with pytest.raises(NothingToResumeError, match="run x is finished") as refused:
            _request("x", overrides, accept_drift=False)
        assert "elasticflow resume x --set train.epochs=N" in (refused.value.remedy or "")
    for longer in [("train.epochs = 9",), ("train.epochs=", "train.steps=9")]:
        train = _request("x", longer, accept_drift=False).job.train
        assert 9 in (train.epochs, train.steps)

    folder.state.write_text('{"status": "finished", "verdict": {"stopped": "rank 0: good enough"}}')
    with pytest.raises(NothingToResumeError) as refused:
        _request("x", ("train.epochs=9",), accept_drift=False)
    assert "--set" not in (refused.value.remedy or "")


def test_way_to_train_on_is_a_command_for_the_folder_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's id alone is found in its own project only."""
    for name in ("project", "other"):
        (tmp_path / name).mkdir()
    folder = _project(tmp_path / "project", monkeypatch)
    assert call(["plan", "small.toml", "-o", str(folder.launch(1))]) == 0
    folder.state.write_text('{"status": "finished"}')
    (tmp_path / "other" / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(NothingToResumeError) as refused:
        _request(str(folder.path), (), accept_drift=False)
    assert f"elasticflow resume {folder.path} --set" in (refused.value.remedy or "")


def test_run_whose_job_file_is_gone_goes_on_with_the_recorded_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next launch folder is written from the record of the one before, and still names the job file."""
    folder = _project(tmp_path, monkeypatch)
    assert call(["plan", "small.toml", "-o", str(folder.launch(1))]) == 0
    (tmp_path / "small.toml").unlink()

    request = _request("x", (), accept_drift=False)
    plan = plan_job(request.job, project_root=request.project_root, job_files=request.files)
    materialize(
        folder.launch(2), launch_files(plan, request.job, folder.launch(2), project_root=request.project_root)
    )

    assert "small.toml is gone; continuing with the job as recorded" in capsys.readouterr().err
    records = [record_in(folder.launch(number)) for number in (1, 2)]
    files = [each.files for each in records if isinstance(each, LaunchRecord)]
    assert [("small.toml",), ("small.toml",)] == files
    first, second = ((folder.launch(n) / "train.py").read_text() for n in (1, 2))
    assert first == second


def test_json_lines_that_nobody_reads_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`elasticflow run --log-format json | head -1`: the reader leaves, training continues."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        for step in range(3):
            _print_json({"event": "step", "step": step})
        monkeypatch.undo()
        with Path(os.devnull).open("w") as nowhere:  # takes what is left in its buffer
            os.dup2(nowhere.fileno(), closed.fileno())


def test_plan_names_the_loss_that_a_step_of_ones_own_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation measures the loss with `model.step` as well, also when there is no other metric."""
    _project(tmp_path, monkeypatch)
    assert call(["plan", "small.toml"]) == 0
    assert "evaluation   every 1 epoch and at the end: loss\n" in capsys.readouterr().out
