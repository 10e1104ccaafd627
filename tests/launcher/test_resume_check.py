"""Whether a run may continue with the job as it is now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.origins import Made, origins_now
from elasticflow.errors import DriftRefusedError
from elasticflow.jobfile.tables.job import Job
from elasticflow.launcher import resume_check
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.snapshots.store.test_catalog import commit

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT / "jobs" / "mnist.toml"


def _job(**changes: Any) -> Job:
    tables = tomli.loads(MNIST.read_text())
    for key, value in changes.items():
        table, name = key.split("__")
        tables[table][name] = value
    return Job.model_validate(tables)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder that does not exist yet."""
    return RunFolder(tmp_path / "runs" / "mnist" / "trial")


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return the place of a run with one snapshot."""
    catalog = Catalog(Storage(str(tmp_path / "bucket")), "trial/")
    commit(catalog, 5)
    return catalog


def _warnings() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def _made(job: Job) -> Made:
    return Made(job, origins_now(job, ROOT, ["jobs/mnist.toml"], "one"))


def test_job_is_found_under_the_snapshot_uri_where_there_is_no_run_folder(
    folder: RunFolder, tmp_path: Path
) -> None:
    """A launch on another machine compares with what the newest one recorded."""
    catalog = Catalog(Storage(str(tmp_path / "bucket")), "trial/")
    assert resume_check.made_before(folder, catalog, print) is None
    for made in (_made(_job()), _made(_job(job__seed=99))):
        plan = plan_job(made.job, project_root=ROOT, job_files=[MNIST])
        resume_check.record_job(folder, catalog, plan, made)

    assert made == resume_check.made_before(folder, catalog, print)


def test_newest_launch_here_is_what_counts(folder: RunFolder, tmp_path: Path) -> None:
    """A run that exists here resumes from the job of its newest launch."""
    catalog = Catalog(Storage(str(tmp_path / "bucket")), "trial/")
    for number, job in ((1, _job()), (2, _job(optimizer__clip_grad_norm=2.0))):
        plan = plan_job(job, project_root=ROOT, job_files=[MNIST])
        materialize(folder.launch(number), launch_files(plan, job, folder.launch(number), project_root=ROOT))

    found = resume_check.made_before(folder, catalog, print)
    assert found is not None
    assert _job(optimizer__clip_grad_norm=2.0) == found.job


def test_what_would_corrupt_the_run_is_refused_whatever_is_accepted(
    folder: RunFolder, catalog: Catalog
) -> None:
    """Another model: refused with the difference, consent or not."""
    for accept in (False, True):
        with pytest.raises(DriftRefusedError) as caught:
            resume_check.check_drift(
                folder,
                catalog,
                _made(_job()),
                _made(_job(model__args={"width": 8})),
                _warnings()[1],
                accept_drift=accept,
            )
        assert "would corrupt the run" in caught.value.message
        assert "width" in caught.value.message
        assert "start a new run of the changed job: elasticflow run" == caught.value.remedy


def test_what_changes_the_trajectory_needs_consent_and_is_said(folder: RunFolder, catalog: Catalog) -> None:
    """Another learning rate: refused, then accepted with a warning."""
    before, changed = _made(_job()), _made(_job(optimizer__args={"lr": 0.1}))
    said, warn = _warnings()
    with pytest.raises(DriftRefusedError) as caught:
        resume_check.check_drift(folder, catalog, before, changed, warn, accept_drift=False)
    assert "changes the trajectory" in caught.value.message
    assert [] == said

    assert resume_check.check_drift(folder, catalog, before, changed, warn, accept_drift=True)
    assert any("lr" in sentence and "trajectory" in sentence for sentence in said)


def test_an_edited_train_py_is_used_where_nothing_tells_whether_it_was_edited(folder: RunFolder) -> None:
    """Training continues with what it has trained with; of a whole record an unedited train.py is made anew."""
    job = _job()
    materialize(
        folder.launch(1),
        launch_files(
            plan_job(job, project_root=ROOT, job_files=[MNIST]), job, folder.launch(1), project_root=ROOT
        ),
    )
    said, warn = _warnings()
    assert resume_check.edited_entry_point(folder, [], warn) is None

    train = folder.launch(1) / "train.py"
    train.write_text(train.read_text() + "# edited\n")
    (folder.launch(1) / "plan.json").write_text("not json")
    carried = resume_check.edited_entry_point(folder, [], warn)
    assert carried == train.read_text()
    assert said[-1].endswith("whether train.py was edited is not known, so it is used as it is")


@pytest.mark.parametrize("changes", [{"model__args": {"width": 8}}, {"optimizer__args": {"lr": 0.1}}])
def test_a_run_without_a_snapshot_begins_anew_with_any_change(
    folder: RunFolder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A run that failed before its first step is mended in its job file, and resumed."""
    said, warn = _warnings()
    empty = Catalog(Storage(str(tmp_path / "bucket")), "trial/")
    assert resume_check.check_drift(
        folder, empty, _made(_job()), _made(_job(**changes)), warn, accept_drift=False
    )
    assert "harmless" in said[0]
    assert "the run has no snapshot" in said[0]


def test_a_run_whose_snapshots_are_elsewhere_or_set_aside_does_not_begin_anew(
    folder: RunFolder, catalog: Catalog, tmp_path: Path
) -> None:
    """The old place may have snapshots; one that is set aside may be good again."""
    moved = _job(snapshots__uri=str(tmp_path / "other"))
    other_store = _job(optimizer__args={"lr": 0.1}, snapshots__options={"endpoint_url": "http://minio:9000"})
    changed = _job(optimizer__args={"lr": 0.1})
    catalog.quarantine(catalog.committed()[0].name, "block 3 is not what was written")
    empty = Catalog(Storage(str(tmp_path / "other")), "trial/")
    for place, job in ((empty, moved), (empty, other_store), (catalog, changed)):
        with pytest.raises(DriftRefusedError):
            resume_check.check_drift(folder, place, _made(_job()), _made(job), print, accept_drift=False)
