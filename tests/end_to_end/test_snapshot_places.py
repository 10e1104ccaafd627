"""What `plan -o` writes trains under plain torchrun; relative snapshot places mean the same folder there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.harness import LIMIT_S, ROOT, named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project


def test_relative_place_is_the_same_under_torchrun_from_another_folder(project: Project) -> None:
    """What `elasticflow run` left at snapshots.uri = "kept" is resumed by torchrun.sh, told file://kept, from elsewhere.

    Its two workers train to the end, which is logged, and commit the last snapshot.
    """
    first = project.run("jobs/mnist.toml", "placed", "train.epochs=1", "snapshots.uri=kept")
    assert first.end() == 0, first.told()
    catalog = Catalog(Storage(str(project.root / "kept")), "placed/")
    (manifest, *_) = catalog.committed()
    assert not (first.run.path / "snapshots").exists()

    sets = ("--set=train.epochs=2", "--set=snapshots.uri=file://kept")
    compiled = project.start("plan", "jobs/mnist.toml", "-o", "launch", *sets, run_id="none")
    assert compiled.end() == 0, compiled.told()
    done = subprocess.run(
        ["bash", str(project.root / "launch" / "torchrun.sh")],
        cwd=project.root / "jobs",
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ELASTICFLOW_RUN_ID": "placed",
        },
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_lines(project.root / "launch" / "logs" / "g0002" / "rank0.jsonl")
    (started,) = named(log, events.TRAINING_STARTED)
    assert started["restored_from"] == manifest.name
    assert started["step"] == manifest.step
    newest = catalog.newest()
    assert newest is not None
    assert newest.step == started["steps"] == 2 * manifest.step
    steps = [(line["step"], line["world_size"]) for line in log if line["event"] == "step"]
    assert (newest.step, 2) == steps[-1]
    assert {2} == {size for _, size in steps}
    assert "training.finished" in done.stdout
    assert json.loads(catalog.storage.read("placed/generations/0002.json"))["way"] == "torchrun"
    assert not (project.root / "jobs" / "kept").exists()
