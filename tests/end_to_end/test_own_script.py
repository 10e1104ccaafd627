"""`[script]`: a script for torchrun, of which no line is changed, killed and drained."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end.harness import named, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

STAYS = """\
import os
import threading
import time
from pathlib import Path

def stay():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def work():
    end = time.process_time() + 4
    while time.process_time() < end:
        pass
    Path("exported").touch()

def sleep():
    time.sleep(12)
    Path("uploaded").touch()

if os.environ["RANK"] == "1":
    {"stay": stay, "work": work, "sleep": sleep}[os.environ["DOES"]]()
"""
STAYING_JOB = """\
[job]
name = "stays"
[script]
entry = "stays.py"
[nodes]
nproc_per_node = 2
[restarts]
hang_timeout = "3 s"
"""
JOB = "examples/own_script/own_script.toml"
ARGS = 'script.args=["--epochs=%d", "--checkpoint=kept.pt", "--pause=%s"]'


def _printed(running: Running, generation: int) -> str:
    """Return what rank 0 has printed in a generation."""
    path = running.run.rank_log(generation, 0, "stdout")
    return path.read_text() if path.exists() else ""


def _asked(project: Project, *arguments: str) -> str:
    """Return what a command prints about the run."""
    asked = project.start(*arguments, run_id="own", job="own-script")
    assert asked.end() == 0, asked.told()
    return asked.output.read_text()


def test_a_script_as_it_is_survives_a_kill_and_leaves_when_it_is_asked_to(project: Project) -> None:
    """It resumes from its own checkpoint, in a group with another port; 75 on SIGTERM, and `resume` continues to its end.

    `status`, `why` and `logs` tell what there is to tell without steps. Nothing of the run is left.
    """
    first = project.run(JOB, "own", ARGS % (500, 0.05), job="own-script")
    first.wait_for("a checkpoint", (project.root / "kept.pt").exists)
    os.kill(first.pid_of(1), signal.SIGKILL)
    first.wait_for("the second group", lambda: "resuming after epoch" in _printed(first, 2))
    first.wait_for("its epochs", lambda: "loss" in _printed(first, 2))
    status = _asked(project, "status", "own")
    assert "script      examples/own_script/train.py" in status
    assert "1 restart, 2 left" in status
    assert "it trains on if it loads a checkpoint of its own, else it began anew (generation 2)" in status
    assert "✓ resuming" not in first.told()
    assert [each["script"] for each in named(first.events(), events.SCRIPT_BEGAN_ANEW)] == [
        "examples/own_script/train.py"
    ]
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.told()
    (failed,) = named(first.events(), events.WORKER_FAILED)
    assert (1, -9, "crash", "killed by SIGKILL") == tuple(
        failed[key] for key in ("rank", "exit_code", "class", "error")
    )
    assert ["crash", "drained"] == [e["class"] for e in named(first.events(), events.GENERATION_ENDED)]
    second = project.start("resume", "own", f"--set={ARGS % (1, 0)}", run_id="own", job="own-script")
    assert second.end() == 0, second.told()
    assert "resuming after epoch" in _printed(second, 3)
    why = _asked(project, "why", "own")
    assert "rank 1: killed by SIGKILL" in why
    assert "script started again after" in why
    assert "training again" not in why
    assert "resuming after epoch" in _asked(project, "logs", "own", "--rank", "0")
    assert [] == wait_gone("own")


def test_a_rank_that_stays_after_its_peers_is_ended_and_one_that_works_is_not(project: Project) -> None:
    """The run ends well, and says what held the rank: its stack. CPU time is a sign of life, a lock is none.

    A rank that sleeps in its own code is waited for, and `status` and `why` say since when.
    """
    (project.root / "stays.py").write_text(STAYS)
    (project.root / "stays.toml").write_text(STAYING_JOB)
    works = project.run("stays.toml", "works", job="stays", DOES="work")
    assert works.end() == 0, works.told()
    assert (project.root / "exported").exists()
    assert [] == named(works.events(), events.WORKER_LINGERED)

    sleeps = project.run("stays.toml", "sleeps", job="stays", DOES="sleep")
    sleeps.wait_for("one that lingers", lambda: sleeps.state().get("activities"))
    sleeps.wait_for("its peer's end", lambda: "linger" in str(sleeps.state()["activities"]))
    awaited = "waiting for rank 1 to end, as rank 0 did, "
    assert f"ending: {awaited}" in " ".join(project.call("status", "sleeps").stdout.split())
    assert f"now {awaited}since " in " ".join(project.call("why", "sleeps").stdout.split())
    assert sleeps.end() == 0, sleeps.told()
    assert (project.root / "uploaded").exists()
    assert [] == named(sleeps.events(), events.WORKER_LINGERED)
    assert "waiting for rank 1" not in project.call("why", "sleeps").stdout

    stays = project.run("stays.toml", "stays", job="stays", DOES="stay")
    assert stays.end() == 0, stays.told()
    (lingered,) = named(stays.events(), events.WORKER_LINGERED)
    assert lingered["rank"] == 1
    assert "stays.py:9 in stay" in lingered["reason"]
    assert "lingered" in stays.told()
    told = project.call("why", "stays").stdout
    assert "finished, nothing went wrong" in told
    assert "rank 1 did not end" in told
    assert "stays.py:9 in stay" in " ".join(told.split())
    assert [] == wait_gone("stays")
