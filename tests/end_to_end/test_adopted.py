"""Scripts of the common forms as `elasticflow adopt --diff` changes them, patched by git: killed, drained, and the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.adopt.scripts import FORMS
from tests.end_to_end.harness import ROOT, named, steps_of, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

# The project's own, and where whoever runs the tests has put a framework.
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
JOB = """
[job]
name = "adopted"
[script]
entry = "train.py"
[nodes]
nproc_per_node = 2
[snapshots]
every = ["7 steps", "1 epoch"]
"""


def _adopted(project: Project, text: str) -> None:
    """Write a script, and have git apply the patch that the command shows."""
    script = project.write("train.py", text)
    project.write("adopted.toml", JOB)
    told = subprocess.run(
        [sys.executable, "-m", "elasticflow", "adopt", "--diff", "train.py"],
        cwd=project.root, check=True, capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    subprocess.run(["git", "apply"], cwd=project.root, input=told.stdout, check=True, timeout=60)
    assert "elasticflow.join()" in script.read_text()


def _steps(form: str) -> int:
    """Return how many steps four epochs of 330 samples are, in batches of 2 x 16: the last one shorter, or left out."""
    return 40 if form == "functions" else 44


def _killed(project: Project) -> Running:
    """Return a run of which a worker was killed in the middle of an epoch."""
    run = project.run("adopted.toml", "disturbed", job="adopted", PAUSE="0.05", PYTHONPATH=PATHS)
    run.wait_for("a snapshot", lambda: named(run.events(), events.SNAPSHOT_COMMITTED))
    os.kill(run.pid_of(1), signal.SIGKILL)
    return run


def _drained(project: Project, steps: int) -> Running:
    """Return a run that was killed in the middle of an epoch, drained in that of another one, and gone on with."""
    run = _killed(project)
    run.wait_for_step(steps // 2, generation=1)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.told()
    return project.start("resume", "disturbed", run_id="disturbed", job="adopted", PYTHONPATH=PATHS)


def _survives(project: Project, form: str, *, is_drained: bool) -> None:
    _adopted(project, FORMS[form])
    alone = project.run("adopted.toml", "alone", job="adopted", PYTHONPATH=PATHS)
    assert alone.end() == 0, alone.told()
    weights = project.root / "weights.pt"
    expected = weights.read_bytes()
    weights.unlink()
    last = _drained(project, _steps(form)) if is_drained else _killed(project)
    assert last.end() == 0, last.told()
    assert [event["rank"] for event in named(last.events(), events.WORKER_FAILED)] == [1]
    assert steps_of(last.run) == steps_of(alone.run) == list(range(1, _steps(form) + 1))
    assert tensors(alone.run) == tensors(last.run)
    # What the script writes itself, at its own end.
    assert weights.read_bytes() == expected


def test_the_trainer_class_of_tutorials_survives(project: Project) -> None:
    """A kill in the middle of an epoch: the same steps and bits as without."""
    _survives(project, "trainer", is_drained=False)


@pytest.mark.campaign
@pytest.mark.parametrize("form", FORMS)
def test_every_form_survives_a_kill_and_a_drain(project: Project, form: str) -> None:
    """All forms, each with its epochs' own work: schedules, measurements, what they save in the end."""
    if form in {"accelerate", "fabric"}:
        pytest.importorskip("lightning_fabric" if form == "fabric" else "accelerate")
    _survives(project, form, is_drained=True)
