"""`run --all`: the cases of a file one after the other, interrupted, killed and resumed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticflow.run_folder import RunFolder
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import Project, read_lines, steps_of

if TYPE_CHECKING:
    from tests.end_to_end.harness import Running

STEPS = 60
SWEEP = f"""
extends = "tiny.toml"

[nodes]
nproc_per_node = 1

[train]
steps = {STEPS}

[snapshots]
every = "10 steps"
options = {{ secret = "${{env:STORE_SECRET}}" }}

[matrix.axes]
job.seed = [1, 2]
"""
SECRET = "never-to-be-seen"


def start(project: Project) -> Running:
    """Start the sweep, looked at through its second case."""
    arguments = ("run", "jobs/sweep.toml", "--all", "--run-id=tuning", "--set=train.threads=1")
    environment = {"STORE_SECRET": SECRET, "TINY_PAUSE_S": "0.01"}
    return project.start(*arguments, run_id="tuning-seed2", job="tiny-seed2", **environment)


def test_a_sweep_goes_on_where_it_was_interrupted_or_killed(project: Project) -> None:
    """SIGTERM in the second case: 75; the same command continues with it, also after kill -9; each step is done once."""
    tiny_job.write_standard(project)
    project.write("jobs/sweep.toml", SWEEP)
    first = RunFolder.of(project.root, "tiny-seed1", "tuning-seed1")
    sweep = start(project)
    sweep.wait_for_step(5)
    sweep.process.send_signal(signal.SIGTERM)
    assert sweep.end() == 75, sweep.told()
    told = sweep.told()
    assert (
        "continue with: elasticflow run jobs/sweep.toml --all --run-id tuning --set=train.threads=1" in told
    )
    assert f"seed1  tuning-seed1  finished     {STEPS}/{STEPS}" in told
    assert "seed2  tuning-seed2  interrupted  " in told
    reached = steps_of(sweep.run)[-1]
    assert 5 <= reached < STEPS

    again = start(project)
    again.wait_for_step(reached + 5)
    os.kill(again.process.pid, signal.SIGKILL)
    again.end()

    tiny_job.hurry(project)
    last = start(project)
    assert last.end() == 0, last.told()
    assert f"seed1  tuning-seed1  finished before  {STEPS}/{STEPS}" in last.told()
    assert f"seed2  tuning-seed2  finished         {STEPS}/{STEPS}" in last.told()
    assert [[1], [1, 2, 3]] == [run.launch_numbers() for run in (first, last.run)]
    for run in (first, last.run):
        assert list(range(1, STEPS + 1)) == steps_of(run)
    assert read_lines(first.metrics)[0]["loss"] != read_lines(last.run.metrics)[0]["loss"]
    files = [path for run in (first, last.run) for path in run.path.rglob("*") if path.is_file()]
    assert [] == [path for path in files if SECRET.encode() in path.read_bytes()]
