"""A run folder as an earlier version left it: `old_run` holds a job, and its run interrupted after step 19 of 40."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import named, read_lines, steps_of

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# Written by the last version whose modules lay flat in `spec`, `runtime`, `snapshots` and `launcher`, on torch 2.13.0.
OLD_RUN = Path(__file__).with_name("old_run")
# What that version came to itself when it went on.
LOSS, EVALUATION = 0.8848251104354858, {"loss": 0.9593531489372253, "accuracy": 0.5}


def test_run_of_an_earlier_version_goes_on(project: Project) -> None:
    """From its snapshot, every step once, to where that version itself would have come."""
    for name in ("digits.py", "job.toml"):
        shutil.copy(OLD_RUN / name, project.root)
    run_folder = project.root / "runs" / "old" / "interrupted"
    shutil.copytree(OLD_RUN / "run", run_folder)

    running = project.start("resume", "interrupted", run_id="interrupted", job="old")
    assert running.end() == 0, running.told()

    assert ["000000000019-0001-6419f234"] == [
        e["name"] for e in named(running.events(), events.SNAPSHOT_CHOSEN)
    ]
    assert list(range(1, 41)) == steps_of(running.run)
    *_, trained, evaluated = read_lines(running.run.metrics)
    # Not bit for bit: another processor may add up in another order.
    assert pytest.approx(LOSS, rel=1e-4) == trained["loss"]
    assert pytest.approx(EVALUATION, rel=1e-4) == evaluated["eval"]
