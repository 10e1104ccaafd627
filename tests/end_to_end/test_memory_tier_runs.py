"""A run with the memory tier, traced: a killed worker costs no snapshot interval, and nothing of the tier outlives a launch."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, steps_of, tensors, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running
    from tests.end_to_end.tiny_job import Reference

JOB, SETS = "jobs/tiny.toml", ("snapshots.every=20 steps", "snapshots.memory=1 step")


def test_killed_worker_costs_steps_and_a_killed_launch_leaves_nothing(
    project: Project, tiny_reference: Reference
) -> None:
    """Kill -9 of a worker: from memory, at the step it was in. Kill -9 of all: no process is left, then from storage.

    Both ranks trace three steps before, and the worker is killed while it traces more. The end has the bits of a run that
    nobody looked at or disturbed.
    """
    tiny_job.write_standard(project)
    running = project.run(JOB, "held", *SETS, job="tiny", TINY_PAUSE_S="0.1")
    running.wait_for_step(3)
    trace(project, "held")
    running.wait_for("the second trace", lambda: len(named(running.events(), events.PROFILE_STARTED)) > 2)
    reached = running.wait_for_step(22)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_step(reached + 1, generation=1)
    require_unfinished_trace(running)
    again = named(running.events(), events.TRAINING_STARTED)[1]
    assert again["from_memory"]
    assert again["step"] >= reached - 1
    assert f"from memory at step {again['step']}" in running.output.read_text()
    assert [] == named(running.events(), events.SNAPSHOT_REJECTED)

    for process in [psutil.Process(running.process.pid), *running.tree()]:
        with suppress(psutil.NoSuchProcess):  # it ends with those before it
            process.kill()
    assert -signal.SIGKILL == running.process.wait()
    assert [] == wait_gone("held")
    assert steps_of(running.run)[-1] < tiny_job.STEPS
    assert [] == list(Path("/dev/shm").glob("*elasticflow*"))

    tiny_job.hurry(project)
    resumed = project.run(JOB, "held", *SETS, job="tiny")
    assert 0 == resumed.end(), resumed.told()
    first = named(resumed.events(), events.TRAINING_STARTED)[-1]
    assert not first["from_memory"]
    assert (
        first["restored_from"] in {e["name"] for e in named(resumed.events(), events.SNAPSHOT_COMMITTED)}
        or first["restored_from"] is None
    )
    steps = steps_of(resumed.run)
    assert list(range(1, tiny_job.STEPS + 1)) == steps
    assert tiny_reference.found["bits"] == tensors(resumed.run)


def trace(project: Project, run_id: str) -> None:
    """Have both ranks trace three steps, and rank 1 begin to trace more steps than there are."""
    done = project.call("profile", run_id, "--steps", "3", "--ranks", "all", "--format", "json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (0, 1) == (first["rank"], second["rank"])
    assert first["first_step"] + 2 == first["last_step"]
    assert 3 == len(first["steps_us"])
    assert {"data", "forward", "backward", "exchange", "optimizer"} <= first["parts_us"].keys()
    assert "aten::addmm" in [operator["name"] for operator in first["operators"]]
    assert project.call("profile", run_id, "--steps", "1000", "--ranks", "1", "--no-wait").returncode == 0


def require_unfinished_trace(running: Running) -> None:
    """The trace of a worker that was killed has failed, by name, and left nothing."""
    [failed] = running.wait_for("the trace's end", lambda: named(running.events(), events.PROFILE_FAILED))
    assert (2, 1, "its generation ended") == (failed["profile"], failed["rank"], failed["reason"])
    assert ["request.json"] == [path.name for path in (running.run.profiles / "2").iterdir()]
