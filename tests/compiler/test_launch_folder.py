from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler import launch_folder as module
from elasticflow.compiler.launch_folder import launch_files, materialize, read_plan
from elasticflow.compiler.plan.launch_plan import LaunchPlan, plan_job
from elasticflow.errors import LaunchFolderError
from elasticflow.jobfile.load import require_job
from tests.compiler.jobs import is_edited, job_in, make_job

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

FILES = ["job.json", "plan.json", "sources/jobs/small.toml", "torchrun.args", "torchrun.sh", "train.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project root with a job file; its content does not matter here."""
    root = tmp_path / "project"
    (root / "jobs").mkdir(parents=True)
    (root / "jobs" / "small.toml").write_text("# small\r\n")
    return root


def _planned(job: Job, project: Path) -> LaunchPlan:
    return plan_job(job, project_root=project, job_files=[project / "jobs" / "small.toml"])


def _write(
    project: Path, folder: Path, job: Job | None = None, *, force: bool = False, **options: Any
) -> None:
    job = job or make_job()
    files = launch_files(_planned(job, project), job, folder, project_root=project, **options)
    materialize(folder, files, force=force)


def _files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_launch_folder_is_written_and_read_back(project: Path) -> None:
    """Plan and job read back from the folder are those that were written."""
    folder, job = (
        project / "runs" / "small" / "x" / "launches" / "0001",
        make_job(model__args={"a": float("inf")}),
    )
    _write(project, folder, job)
    assert _files_of(folder) == FILES
    assert job_in(folder) == job
    assert read_plan(folder) == _planned(job, project)
    assert (folder / "torchrun.args").read_text().splitlines() == list(_planned(job, project).torchrun_args)
    assert (folder / "sources" / "jobs" / "small.toml").read_bytes() == b"# small\r\n"
    assert os.access(folder / "torchrun.sh", os.X_OK)
    assert 'ROOT = (HERE / "../../../../..").resolve()' in (folder / "train.py").read_text()


def test_the_record_tells_where_the_job_came_from(project: Path) -> None:
    """job.json holds digest, files, their digests, overrides and the way back; nothing of machine or checkout."""
    _write(project, project / "out", overrides=["train.epochs=2"])
    record = json.loads((project / "out" / "job.json").read_text())
    assert record["digest"] == _planned(make_job(), project).job_digest
    assert (record["files"], record["overrides"], record["root"]) == (
        ["jobs/small.toml"],
        ["train.epochs=2"],
        "..",
    )
    assert record["sources"]["jobs/small.toml"]["roles"] == ["job file"]
    assert not {"git", "versions", "machine", "launch_id"} & record.keys()


def test_a_job_file_outside_of_the_project(project: Path) -> None:
    """Sources from beside the project stay inside the launch folder."""
    beside = project.parent / "base.toml"
    beside.write_text("")
    plan = plan_job(make_job(), project_root=project, job_files=[beside])
    materialize(project / "out", launch_files(plan, make_job(), project / "out", project_root=project))
    assert (project / "out" / "sources" / "up" / "base.toml").exists()


def test_writing_again_replaces_our_own_files_only(project: Path) -> None:
    """A changed job replaces what we wrote; what a run put beside it stays."""
    folder = project / "out"
    _write(project, folder)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "kept").write_text("bytes")
    _write(project, folder, make_job(train__epochs=9))
    assert "EPOCHS = 9" in (folder / "train.py").read_text()
    assert _files_of(folder) == sorted([*FILES, "snapshots/kept"])


def test_an_edited_entry_point_is_noticed_and_kept(project: Path) -> None:
    """An edited train.py is not overwritten without force, and nothing else is written then."""
    folder = project / "out"
    _write(project, folder)
    assert not is_edited(folder)
    (folder / "train.py").write_text("# mine\n")
    assert is_edited(folder)
    before = (folder / "plan.json").read_bytes()
    with pytest.raises(LaunchFolderError) as caught:
        _write(project, folder, make_job(train__epochs=9))
    assert caught.value.message == f"{folder}: edited by hand since it was written: train.py"
    assert caught.value.remedy == "--force replaces it; or write to another folder"
    assert ((folder / "train.py").read_text(), (folder / "plan.json").read_bytes()) == ("# mine\n", before)
    _write(project, folder, make_job(train__epochs=9), force=True)
    assert not is_edited(folder)


@pytest.mark.parametrize("plan_json", [None, "not json", "{}", "[]"])
def test_files_of_others_are_refused(project: Path, plan_json: str | None) -> None:
    """A train.py that we did not make is not overwritten without force, whatever plan.json says."""
    folder = project / "out"
    folder.mkdir()
    (folder / "train.py").write_text("# theirs\n")
    if plan_json is not None:
        (folder / "plan.json").write_text(plan_json)
    names = "train.py" if plan_json is None else "train.py, plan.json"
    with pytest.raises(LaunchFolderError) as caught:
        _write(project, folder)
    assert caught.value.message == f"{folder}: made by something else: {names}"
    _write(project, folder, force=True)
    assert job_in(folder) == make_job()


def test_an_edited_entry_point_is_carried_forward_as_edited(project: Path) -> None:
    """The next launch gets the edited train.py, and it is still known as edited there."""
    _write(project, project / "0002", entry_point="# mine\n")
    assert (project / "0002" / "train.py").read_text() == "# mine\n"
    assert is_edited(project / "0002")


def test_a_crash_leaves_nothing_behind(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder appears complete or not at all: a write that fails leaves nothing."""
    real, written = module._write, []

    def fail_at_the_third(path: Path, text: str) -> None:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        real(path, text)

    monkeypatch.setattr(module, "_write", fail_at_the_third)
    with pytest.raises(LaunchFolderError) as caught:
        _write(project, project / "runs" / "out")
    assert caught.value.message == f"cannot write {project / 'runs' / 'out'}: No space left on device"
    assert list((project / "runs").iterdir()) == []


def test_the_plan_is_written_last(project: Path) -> None:
    """plan.json vouches for the other files, so it is written after them."""
    job = make_job()
    names = list(module.launch_files(_planned(job, project), job, project / "out", project_root=project))
    assert names[-1] == "plan.json"


def test_a_crash_between_two_files_can_be_compiled_over(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash in the middle of a rewrite the same compile succeeds without force."""
    folder, changed = project / "out", make_job(train__epochs=9)
    _write(project, folder)
    real = module._write

    def fail_at_the_plan(path: Path, text: str) -> None:
        if "plan.json" in path.name:
            raise OSError(28, "No space left on device")
        real(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", fail_at_the_plan)
        with pytest.raises(LaunchFolderError):
            _write(project, folder, changed)
    _write(project, folder, changed)
    assert job_in(folder) == changed
    assert not is_edited(folder)


def test_the_folder_is_a_file(project: Path) -> None:
    """A file in the folder's place is an error with the path in it."""
    (project / "out").write_text("")
    with pytest.raises(LaunchFolderError, match=f"cannot write {project / 'out'}: Not a directory"):
        _write(project, project / "out")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2}'])
def test_a_folder_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    """A missing or damaged plan.json is one error that names the file."""
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(LaunchFolderError, match=str(tmp_path / "plan.json")):
        read_plan(tmp_path)


def test_from_job_file_to_launch_folder(tmp_path: Path) -> None:
    """A plan is written whole, with the overrides it was made with, and gives the optimizer the model it asks for."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pieces.py").write_text(
        "def net(): ...\ndef loss(a, b): ...\ndef sgd_of(model, lr): ...\n"
        "class Data:\n    def __len__(self): ...\n    def __getitem__(self, i): ...\n"
    )
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "whole"\n[model]\nentry = "pieces:net"\nloss = "pieces:loss"\n'
        '[optimizer]\nentry = "pieces:sgd_of"\nargs = { lr = 0.1 }\n'
        '[dataset]\nentry = "pieces:Data"\nglobal_batch_size = 8\n[train]\nepochs = 1\n[nodes]\nnproc_per_node = 1\n'
    )
    overrides = ("train.epochs=7",)
    loaded = require_job(tmp_path / "job.toml", overrides)
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(
        tmp_path / "out",
        launch_files(
            plan, loaded.job, tmp_path / "out", project_root=loaded.project_root, overrides=overrides
        ),
    )
    text = (tmp_path / "out" / "train.py").read_text()
    assert "EPOCHS = 7" in text
    assert "return sgd_of(model, lr=0.1)" in text
    assert "--set=train.epochs=7" in text
    assert read_plan(tmp_path / "out") == plan


def test_a_plan_of_an_earlier_version_is_read(project: Path) -> None:
    """It also held the table of world sizes, which `plan` makes by itself now."""
    _write(project, project / "out")
    path = project / "out" / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "worlds": [{"nodes": 1}]}))
    assert read_plan(project / "out") == _planned(make_job(), project)
