"""A child that a signal has stopped is ended."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow.system.processes import STOPPED, STOPPED_S, StoppedChild, state_of
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def child(real_processes: None) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a child that sleeps."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == STOPPED)


def test_child_that_stays_stopped_is_killed(child: subprocess.Popen[bytes]) -> None:
    """After its time, counted from when it was first seen so."""
    watch = StoppedChild(child, 0.0)
    _stop(child)
    for second in range(1, 1 + int(STOPPED_S)):
        watch.look(float(second))
    assert child.poll() is None
    watch.look(1.0 + STOPPED_S)
    assert -signal.SIGKILL == child.wait(5)


def test_helper_of_the_child_counts_as_the_child(child: subprocess.Popen[bytes]) -> None:
    """The child waits for a process that does its work."""
    helper = subprocess.Popen(["sleep", "60"])
    try:
        watch = StoppedChild(child, 0.0)
        _stop(helper)
        for second in range(1, 3 + int(STOPPED_S)):
            watch.look(float(second), lambda: [helper.pid])
        assert -signal.SIGKILL == child.wait(5)
    finally:
        helper.kill()
        helper.wait()


def test_child_that_was_woken_up_in_time_lives(child: subprocess.Popen[bytes]) -> None:
    """Each stop has the whole time."""
    watch = StoppedChild(child, 0.0)
    _stop(child)
    for second in range(1, 10):
        watch.look(float(second))
    os.kill(child.pid, signal.SIGCONT)
    wait_until(lambda: state_of(child.pid) != STOPPED)
    watch.look(10.0)
    _stop(child)
    for second in range(11, 21):
        watch.look(float(second))
    assert child.poll() is None


def test_pause_of_the_observer_does_not_count(child: subprocess.Popen[bytes]) -> None:
    """All processes were stopped together, and the observer was woken up first."""
    watch = StoppedChild(child, 0.0)
    _stop(child)
    watch.look(1.0)
    watch.look(3600.0)
    watch.look(3601.0)
    assert child.poll() is None
