"""Leaving on a signal and going on: the same bits as a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, Running, named, steps_of, tensors

QUICK = ("train.epochs=6", "snapshots.every=15 steps")


def _finished(project: Project, run_id: str, workers: int) -> Running:
    running = project.run("jobs/mnist.toml", run_id, *QUICK, f"nodes.nproc_per_node={workers}")
    assert running.end() == 0, running.told()
    return running


@pytest.mark.parametrize("workers", [2, 3])
def test_interrupted_runs_end_with_the_bits_of_an_undisturbed_one(project: Project, workers: int) -> None:
    """SIGTERM, then kill -9 of everything; resumed each time; BatchNorm and dropout in the model."""
    undisturbed = _finished(project, "undisturbed", workers)

    sets = (*QUICK, f"nodes.nproc_per_node={workers}")
    drained = project.run("jobs/mnist.toml", "disturbed", *sets)
    drained.wait_for_step(8)
    os.kill(drained.process.pid, signal.SIGTERM)
    assert drained.end(30) == 75, drained.told()
    left_at = named(drained.events(), events.DRAIN_COMPLETED)[0]["step"]
    assert left_at == drained.state()["step"]

    killed = project.start("resume", "disturbed", run_id="disturbed")
    killed.wait_for_step(left_at + 12, generation=1)
    for process in [psutil.Process(killed.process.pid), *killed.tree()]:
        process.kill()
    killed.process.wait()

    resumed = project.start("resume", "disturbed", run_id="disturbed")
    assert resumed.end() == 0, resumed.told()
    assert steps_of(undisturbed.run) == steps_of(resumed.run)
    expected, actual = tensors(undisturbed.run), tensors(resumed.run)
    assert expected.keys() == actual.keys()
    assert [] == [key for key, data in expected.items() if actual[key] != data]


def test_signal_before_the_first_snapshot_goes_on_from_scratch(project: Project) -> None:
    """SIGTERM while starting: exit 75 at once; the same command then starts and finishes."""
    early = project.run("jobs/mnist.toml", "early", *QUICK)
    early.wait_for("the run's start", lambda: named(early.events(), events.RUN_STARTED))
    os.kill(early.process.pid, signal.SIGTERM)
    assert early.end(30) == 75, early.told()

    again = project.run("jobs/mnist.toml", "early", *QUICK)
    assert again.end() == 0, again.told()
    assert "finished" == again.state()["status"]


def test_signal_sent_twice_at_once_is_one_request(project: Project) -> None:
    """`timeout` signals its command and then its own group, a closed terminal likewise: a drain, not an end at once."""
    running = project.run("jobs/mnist.toml", "doubled", *QUICK)
    running.wait_for_step(5)
    os.kill(running.process.pid, signal.SIGTERM)
    os.killpg(running.process.pid, signal.SIGHUP)

    assert running.end(30) == 75, running.told()
    assert 1 == len(named(running.events(), events.DRAIN_COMPLETED))


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
    early = project.run("jobs/mnist.toml", f"earliest-{number}", *QUICK)
    early.wait_for("the first handler", lambda: _catches(early.process.pid, number))
    os.kill(early.process.pid, number)

    assert early.end(30) == 75, early.told()


def test_second_signal_ends_at_once_with_130(project: Project) -> None:
    """Two interrupts while a drain cannot come to its end: gone within two seconds, and the exit code says so."""
    running = project.run("jobs/mnist.toml", "impatient", *QUICK)
    running.wait_for_step(5)
    os.kill(running.pid_of(1), signal.SIGSTOP)
    os.kill(running.process.pid, signal.SIGINT)
    running.wait_for("the drain's request", lambda: named(running.events(), events.DRAIN_REQUESTED))
    time.sleep(0.3)  # at the same moment it would be the same request
    assert running.process.poll() is None
    os.kill(running.process.pid, signal.SIGINT)

    assert running.end(2) == 130, running.told()
    assert "interrupted" == running.state()["status"]


def test_signal_to_the_whole_process_group_is_a_drain(project: Project) -> None:
    """TERM to every process of the tree at once, as Slurm and systemd send it, still drains to exit 75; so does INT."""
    running = project.run("jobs/mnist.toml", "everybody", *QUICK, "dataset.num_workers=1")
    running.wait_for_step(5)
    everybody = [psutil.Process(running.process.pid), *running.tree()]
    assert 8 <= len(everybody)  # the command, agent, fork server, writer, two workers, two loader processes
    for number in (signal.SIGTERM, signal.SIGINT):
        for process in everybody:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    assert running.end(30) == 75, running.told()
    assert [] == named(running.events(), events.WORKER_FAILED)
    committed = named(running.events(), events.SNAPSHOT_COMMITTED)
    assert committed[-1]["step"] == running.state()["step"]
