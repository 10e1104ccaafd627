from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from elasticflow.errors import NOT_STARTED, RunNotFoundError
from elasticflow.observe.runs import find_run, is_finished, list_runs, newest_resumable
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import at


def make(root: Path, job: str, run_id: str, started: float, status: str = "interrupted") -> Path:
    """Make a run that started so many seconds after the start of all."""
    folder = RunFolder.of(root, job, run_id)
    folder.launch(1).mkdir(parents=True)
    folder.state.write_text(json.dumps({"status": status, "started": at(started)}))
    return folder.path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with four runs of two jobs."""
    make(tmp_path, "mnist", "20261120-100000-aaaa", 0)
    make(tmp_path, "mnist", "20261120-110000-bbbb", 3600)
    make(tmp_path, "cifar", "nightly", 1800)
    make(tmp_path, "mnist", "early-name-but-newest", 7200, "finished")
    return tmp_path


def test_newest_launch_first(project: Path) -> None:
    """The order is that of time, not of names; other folders in runs/ are no runs."""
    (project / "runs" / "mnist" / "notes").mkdir()
    (project / "runs" / "mnist" / ".hidden").mkdir()
    (project / "runs" / "readme.txt").touch()
    assert [run.run_id for run in list_runs(project)] == [
        "early-name-but-newest",
        "20261120-110000-bbbb",
        "nightly",
        "20261120-100000-aaaa",
    ]
    assert [run.run_id for run in list_runs(project, "cifar")] == ["nightly"]
    assert list_runs(project / "elsewhere") == []


def test_a_run_is_a_folder_an_id_or_the_newest_of_a_job(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the ways to say which run; nothing at all is the newest."""
    monkeypatch.chdir(project)
    assert find_run(project, None).run_id == "early-name-but-newest"
    assert find_run(project, "mnist").run_id == "early-name-but-newest"
    assert find_run(project, "nightly").job == "cifar"
    assert find_run(project, "runs/cifar/nightly").path == project / "runs" / "cifar" / "nightly"
    assert find_run(project, str(project / "runs" / "cifar" / "nightly") + "/").run_id == "nightly"


def test_a_run_is_found_by_its_job_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's name stands in the file; the file's own project is looked through."""
    job = Path(__file__).parents[2] / "jobs" / "mnist.toml"
    (project / "jobs").mkdir()
    (project / "examples").symlink_to(job.parents[1] / "examples")
    (project / "jobs" / "other.toml").write_text(job.read_text().replace('name = "mnist"', 'name = "cifar"'))
    monkeypatch.chdir(project)
    assert "nightly" == find_run(project, "jobs/other.toml").run_id


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("mnst", 'did you mean "mnist"?'),
        ("jobs/gone.toml", "there is no such file; give the job's name"),
        ("zzz", "give a run folder, a run id or a job's name, such as cifar; `elasticflow runs` lists them"),
    ],
)
def test_an_unknown_run(project: Path, text: str, remedy: str) -> None:
    """The error names what was asked for and where it was looked for, and helps on."""
    with pytest.raises(RunNotFoundError, match=re.escape(f'no run "{text}" in {project / "runs"}')) as caught:
        find_run(project, text)
    assert caught.value.remedy == remedy
    assert caught.value.exit_code == NOT_STARTED


def test_no_runs_at_all(tmp_path: Path) -> None:
    """A fresh project says how to start."""
    with pytest.raises(RunNotFoundError, match="there are no runs in") as caught:
        find_run(tmp_path, None)
    assert caught.value.remedy == "start one: elasticflow run JOB.toml"
    with pytest.raises(RunNotFoundError, match='no run "mnist"') as caught:
        find_run(tmp_path, "mnist")
    assert caught.value.remedy == "there are no runs yet; start one: elasticflow run JOB.toml"


@pytest.mark.parametrize("text", [None, "mnist", "nightly"])
def test_a_run_that_another_machine_leads_is_not_unknown(tmp_path: Path, text: str | None) -> None:
    """This machine has taken part in it, with a run folder of its own."""
    (tmp_path / "runs" / "mnist" / "nightly" / "nodes" / "gpu2-1").mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match="run nightly is led by another machine") as refused:
        find_run(tmp_path, text)
    assert refused.value.remedy == "give the command on the machine that leads it"


def test_an_id_that_two_jobs_use_is_not_guessed(project: Path) -> None:
    """`--run-id` may be the same for two jobs; then the folder is needed."""
    make(project, "mnist", "nightly", 9000)
    with pytest.raises(RunNotFoundError, match='"nightly" is the id of 2 runs') as caught:
        find_run(project, "nightly")
    assert caught.value.remedy == "give the run's folder"


def test_what_can_be_resumed(project: Path) -> None:
    """The newest run that is not finished; a finished one is none."""
    found = newest_resumable(project)
    assert found is not None
    assert found.run_id == "20261120-110000-bbbb"
    assert [is_finished(run) for run in list_runs(project)] == [True, False, False, False]
    assert not is_finished(RunFolder.of(project, "mnist", "never"))
    assert newest_resumable(project / "elsewhere") is None
