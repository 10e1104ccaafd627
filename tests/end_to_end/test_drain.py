"""Leaving on a signal and resuming: the same bits as a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import LIMIT_S, named, steps_of

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running
    from tests.end_to_end.tiny_job import Reference

# tests/runtime/test_trajectory.py drains BatchNorm in batch mode, where only as many workers have the same bits.
SETS = ("nodes.nproc_per_node=3", "dataset.num_workers=1", f"snapshots.grace={4 * LIMIT_S} s")
GROUP = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def _start(project: Project, run_id: str) -> Series:
    return Series(project, run_id, *SETS, job="tiny", TINY_PAUSE_S="0.03")


def _leave(running: Running) -> int:
    assert running.end() == 75, running.told()
    assert [] == named(running.events(), events.WORKER_FAILED)
    (drained,) = named(running.events(), events.DRAIN_COMPLETED)
    step = int(drained["step"])
    assert step == running.state()["step"]
    assert step == named(running.events(), events.SNAPSHOT_COMMITTED)[-1]["step"]
    return step


def test_interrupted_run_ends_with_the_bits_of_an_undisturbed_one(
    project: Project, tiny_reference: Reference
) -> None:
    """Interrupted before its first snapshot: 75 at once, and the same command starts it again. Then two ways to leave.

    TERM, HUP and INT to every process of the tree at once, as Slurm, systemd, `timeout` and a closed terminal send them,
    are one request: a drain to 75. Two interrupts while a drain cannot come to its end: gone at once, with 130.
    """
    tiny_job.write_standard(project)
    early = _start(project, "disturbed").running
    early.wait_for("the run's start", lambda: named(early.events(), events.RUN_STARTED))
    os.kill(early.process.pid, signal.SIGTERM)
    assert early.end() == 75, early.told()

    series = _start(project, "disturbed")
    generation = series.trains(0)
    series.reach(7)
    everybody = [psutil.Process(series.running.process.pid), *series.running.tree()]
    assert 10 <= len(
        everybody
    )  # the command, agent, fork server, writer, three workers, three loader processes
    everybody[0].suspend()  # so that what is sent comes at one moment, however busy the machine is
    for process in everybody:
        for number in GROUP:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    everybody[0].resume()
    left_at = _leave(series.running)

    series.resume()
    impatient = series.running
    generation = series.trains(generation)
    series.reach(left_at + 7)
    os.kill(impatient.pid_of(1), signal.SIGSTOP)
    os.kill(impatient.process.pid, signal.SIGINT)
    impatient.wait_for("the drain's request", lambda: len(series.named(events.DRAIN_REQUESTED)) == 2)
    time.sleep(0.3)  # at the same moment it would be the same request
    assert impatient.process.poll() is None
    os.kill(impatient.process.pid, signal.SIGINT)
    assert impatient.end() == 130, impatient.told()  # the drain's own time is longer than this waits
    assert "interrupted" == impatient.state()["status"]

    tiny_job.hurry(project)
    series.resume()
    outcome = Outcome("", "")
    series.finish(tiny_reference.found, outcome)
    assert [] == outcome.problems
    assert list(range(1, tiny_job.STEPS + 1)) == steps_of(series.running.run)


def _catches(pid: int, number: signal.Signals) -> bool:
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_while_the_command_imports_is_an_interruption_too(
    project: Project, number: signal.Signals
) -> None:
    """As soon as the command hears signals at all, one of them means 75, not death by the signal."""
    project.fresh = True
    early = project.run("jobs/mnist.toml", f"earliest-{number}")
    early.wait_for("the first handler", lambda: _catches(early.process.pid, number))
    os.kill(early.process.pid, number)

    assert early.end() == 75, early.told()


def test_a_launch_leaves_at_its_time_limit(project: Project) -> None:
    """As for a signal: once, exit 75; the same command starts it again, until the limit of that launch."""
    told = []
    for limit in ("4 s", "1 s"):
        sets = ("train.epochs=1000000", f"train.time_limit={limit}", "logging.every=100 steps")
        launch = project.run("jobs/mnist.toml", "limited", *sets)
        assert launch.end() == 75, launch.told()
        told.append(f"train.time_limit of {limit}")
        happened = launch.events()
        assert told == [each["reason"] for each in named(happened, events.DRAIN_REQUESTED)]
        assert len(told) == len(named(happened, events.RUN_INTERRUPTED))
