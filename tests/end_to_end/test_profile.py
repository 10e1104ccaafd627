"""`elasticflow profile` on a run that trains: traces of its steps, and the bits of a run that nobody looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end.harness import ROOT, named, tensors
from tests.end_to_end.trajectory_jobs import write_jobs

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

STEPS = ("train.steps=120", "nodes.nproc_per_node=2")


def profile(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "elasticflow", "profile", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=project.root, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_traces_while_it_trains_and_the_same_bits(project: Project) -> None:
    """Both ranks trace three steps; then one is killed while it traces; the weights are those of a run without all that."""
    write_jobs(project)
    plain = project.run("jobs/mlp.toml", "plain", *STEPS, job="mlp")
    assert plain.end() == 0, plain.told()
    traced = project.run("jobs/mlp.toml", "traced", *STEPS, job="mlp", TRAJECTORY_PAUSE_S="0.03")
    traced.wait_for_step(3)

    done = profile(project, "traced", "--steps", "3", "--ranks", "all", "--format", "json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (0, 1) == (first["rank"], second["rank"])
    assert first["first_step"] + 2 == first["last_step"]
    assert 3 == len(first["steps_us"])
    assert {"data", "forward", "backward", "exchange", "optimizer"} <= first["parts_us"].keys()
    assert "aten::addmm" in [operator["name"] for operator in first["operators"]]

    assert profile(project, "traced", "--steps", "1000", "--ranks", "1", "--no-wait").returncode == 0
    traced.wait_for("the second trace", lambda: len(named(traced.events(), events.PROFILE_STARTED)) > 2)
    os.kill(traced.pid_of(1), signal.SIGKILL)
    assert traced.end() == 0, traced.told()
    [failed] = named(traced.events(), events.PROFILE_FAILED)
    assert (2, 1, "its generation ended") == (failed["profile"], failed["rank"], failed["reason"])
    assert ["request.json"] == [path.name for path in (traced.run.profiles / "2").iterdir()]
    assert tensors(plain.run) == tensors(traced.run)
