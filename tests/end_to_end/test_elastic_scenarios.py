"""What the tests of torch's own elastic agent have their workers do, done by workers of a `[script]` job."""

from __future__ import annotations

import os
import signal

import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, Running, named, wait_gone

pytestmark = pytest.mark.nightly  # tests of own scripts, kills and drains show the same one by one

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank, scenario = int(os.environ["RANK"]), sys.argv[1]
print(f"{scenario}: rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
print(f"{scenario}: error of rank {rank}", file=sys.stderr, flush=True)
if scenario == "fail" and rank % 2:
    raise RuntimeError(f"rank {rank} fails")
if scenario == "hang":
    if rank:
        sys.exit(7)
    time.sleep(3600)
if scenario == "zombie":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"deaf-{rank}").touch()
    time.sleep(3600)
"""
JOB = """
[job]
name = "scenario"
[script]
entry = "scenario.py"
args = ["%s"]
[nodes]
nproc_per_node = 2
device = "cpu"
[restarts]
budget = 0
"""


def start(project: Project, scenario: str) -> Running:
    """Start a job of two workers that do what the scenario says."""
    project.write("scenario.py", SCRIPT)
    project.write("scenario.toml", JOB % scenario)
    return project.run("scenario.toml", scenario, job="scenario")


def printed(running: Running, rank: int, stream: str) -> str:
    """Return what a rank has printed on a stream."""
    return running.run.rank_log(1, rank, stream).read_text()


def test_fail(project: Project) -> None:
    """Odd ranks raise and even ones succeed: the run ends, its budget spent, and names who was first, and what it said."""
    running = start(project, "fail")
    assert running.end() == 3, running.told()
    (failed,) = named(running.events(), events.WORKER_FAILED)
    assert failed["rank"] == 1
    assert "rank 1 fails" in failed["error"]


def test_hang(project: Project) -> None:
    """A rank that sleeps while another has failed is ended with it."""
    running = start(project, "hang")
    assert running.end() == 3, running.told()
    (failed,) = named(running.events(), events.WORKER_FAILED)
    assert (failed["rank"], failed["exit_code"]) == (1, 7)
    assert [] == wait_gone("hang")


def test_redirect(project: Project) -> None:
    """Each rank's two streams are files of their own."""
    running = start(project, "redirect")
    assert running.end() == 0, running.told()
    for rank in range(2):
        assert printed(running, rank, "stdout") == f"redirect: rank {rank} of 2\n"
        assert f"redirect: error of rank {rank}\n" in printed(running, rank, "stderr")


def test_zombie(project: Project) -> None:
    """If the launcher is killed, no worker stays, not even one that is deaf to SIGTERM."""
    running = start(project, "zombie")
    deaf = [project.root / f"deaf-{rank}" for rank in range(2)]
    running.wait_for("the workers", lambda: all(path.exists() for path in deaf))
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    assert [] == wait_gone("zombie")
