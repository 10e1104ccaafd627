"""A train.py that was edited by hand is carried forward, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from elasticflow.compiler.launch_folder.edited_entry_point import edited_entry_point
from elasticflow.compiler.launch_folder.materialize import materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.drift import compare
from elasticflow.jobfile.tables.job import Job
from elasticflow.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
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


def _warnings() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def test_edited_entry_point_is_carried_forward_unless_the_job_changed(folder: RunFolder) -> None:
    """An edit survives a resume; a changed job makes train.py anew and says where the edit is."""
    job = _job()
    materialize(plan_job(job, project_root=ROOT, job_files=[MNIST]), job, folder.launch(1), project_root=ROOT)
    said, warn = _warnings()
    assert edited_entry_point(folder, ROOT, [], warn) is None

    train = folder.launch(1) / "train.py"
    train.write_text(train.read_text() + "# edited\n")
    carried = edited_entry_point(folder, ROOT, [], warn)
    assert carried is not None
    assert carried.endswith("# edited\n")
    assert [] == said

    differences = compare(job, _job(restarts__budget=9))
    assert edited_entry_point(folder, ROOT, differences, warn) is None
    assert (
        said[-1] == f"the job changed, so train.py is made anew; the edited one stays in {folder.launch(1)}"
    )
