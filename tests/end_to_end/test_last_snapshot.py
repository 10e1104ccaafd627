"""A launch that fails for good while its writer is still writing."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import LIMIT_S, Project, Running, named, wait_gone

if TYPE_CHECKING:
    import psutil

# The wait for the writer would take longer than this test waits for its end.
SETS = (
    "snapshots.every=20 steps",
    "snapshots.memory=off",
    "restarts.budget=0",
    f"snapshots.grace={4 * LIMIT_S} s",
)


def fail_with_a_busy_writer(project: Project, run_id: str) -> tuple[Running, psutil.Process, int]:
    """Return a run whose budget is spent, its halted writer, and the step of the snapshot that this one still holds."""
    tiny_job.write_standard(project)
    running = project.run("jobs/tiny.toml", run_id, *SETS, job="tiny", TINY_PAUSE_S="0.04")
    running.wait_for_step(5)
    writer = next(p for p in running.tree() if "elasticflow.snapshots.writer.main" in p.cmdline())
    writer.suspend()  # as slow as a store can be
    staged = running.wait_for("a snapshot", lambda: named(running.events(), events.SNAPSHOT_STAGED))
    # Rank 0 says that it is staged. Two steps on, every rank has handed its share over.
    running.wait_for_step(int(staged[0]["step"]) + 2)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for("the verdict", lambda: named(running.events(), events.BUDGET_SPENT))
    return running, writer, int(staged[0]["step"])


def test_failed_launch_lets_its_writer_finish(project: Project) -> None:
    """The budget is spent while a snapshot is being written: it is committed, told, and the next launch resumes from it."""
    running, writer, step = fail_with_a_busy_writer(project, "patient")
    time.sleep(1.0)
    assert running.process.poll() is None
    writer.resume()

    assert running.end() == 3, running.told()
    newest = Catalog(Storage(str(running.run.path))).newest()
    assert newest is not None
    assert newest.step >= step
    committed = [event["step"] for event in named(running.events(), events.SNAPSHOT_COMMITTED)]
    assert newest.step in committed
    assert running.state()["snapshot"] == newest.name


def test_signal_ends_the_wait_for_the_writer(project: Project) -> None:
    """Ctrl-C while a failed launch waits for its writer ends it at once, still with the failure's exit code."""
    running, _, _ = fail_with_a_busy_writer(project, "hasty")
    running.process.send_signal(signal.SIGINT)

    assert running.end() == 3, running.told()
    assert [] == wait_gone("hasty")
    assert "failed" == running.state()["status"]


def test_supervisor_killed_while_it_waits_for_the_writer(project: Project) -> None:
    """Kill -9 of the supervisor: neither agent nor writer outlives it."""
    running, _, _ = fail_with_a_busy_writer(project, "waiting")
    running.process.kill()
    running.process.wait()

    assert [] == wait_gone("waiting")
