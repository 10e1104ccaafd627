"""What `compile` writes runs in three ways: under elasticflow, under plain torchrun, and as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage
from tests.end_to_end.harness import ROOT, Project

SETS = ("--set=train.epochs=2", "--set=snapshots.every=1 epoch")


def _compiled(project: Project) -> Path:
    done = project.start("compile", "jobs/mnist.toml", "-o", "launch", *SETS, run_id="none")
    assert done.end(30) == 0, done.told()
    return project.root / "launch"


def _by_hand(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        command,
        cwd=project.root / "jobs",
        env=environment,
        text=True,
        capture_output=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("way", ["torchrun.sh", "train.py"])
def test_compiled_job_trains_by_hand_from_any_folder(project: Project, way: str) -> None:
    """Bash torchrun.sh (two workers) and python train.py (one) train to the end and commit the last snapshot."""
    folder = _compiled(project)
    command = ("bash", str(folder / way)) if way.endswith(".sh") else (sys.executable, str(folder / way))

    done = _by_hand(project, *command)

    assert done.returncode == 0, done.stdout + done.stderr
    newest = Catalog(Storage(str(folder))).newest()
    assert newest is not None
    lines = [
        json.loads(line) for line in (folder / "logs" / "g0001" / "rank0.jsonl").read_text().splitlines()
    ]
    last = max(line["step"] for line in lines if line["event"] == "step")
    assert last == newest.step
    assert [2 if way.endswith(".sh") else 1] == list({line["world_size"] for line in lines})
    assert "training.finished" in done.stdout


def test_compiled_job_run_by_hand_again_has_nothing_left_to_do(project: Project) -> None:
    """A second `python train.py` finds the last snapshot, trains no step, and ends well."""
    folder = _compiled(project)
    for _ in range(2):
        done = _by_hand(project, sys.executable, str(folder / "train.py"))
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "logs" / "g0002" / "rank0.jsonl").read_text().splitlines()

    assert [] == [line for line in lines if json.loads(line)["event"] == "step"]
