"""When a rank that stays after its peers is judged to be stuck; real processes, no clock."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent.lingering import GRACE_S, LingeringRanks, sleeps, waits_for_peers
from elasticflow.protocol.messages import Frame, StalledWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
BUSY = "import threading, time\nwhile time.process_time() < %f: pass\nprint(flush=True)\nthreading.Event().wait()"


@pytest.fixture
def process(real_processes: None) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that waits for ever once it has printed a line and has used most of a second of CPU time."""
    started = subprocess.Popen([sys.executable, "-c", BUSY % 0.9], stdout=subprocess.PIPE, text=True)
    with started:
        yield started
        started.kill()


def test_a_silent_process_without_cpu_time_is_stuck_after_the_grace(process: subprocess.Popen[str]) -> None:
    """CPU time, output and an observer that was paused put it off."""
    assert process.stdout is not None
    ranks = LingeringRanks(1e9)
    assert not ranks.look(100.0, {process.pid: 0.0})
    process.stdout.readline()  # it has used CPU time since the first look
    looks = [ranks.look(100.0 + second, {process.pid: 1000.0}) for second in range(5, 900, 5)]
    assert looks.index(True) == pytest.approx(GRACE_S / 5, abs=1)
    assert not ranks.look(1000.0 + GRACE_S, {process.pid: 1000.0})  # a pause of the observer
    for second in range(5, 900, 5):
        assert not ranks.look(1000.0 + GRACE_S + second, {process.pid: 3.0})


def test_a_process_with_children_works(real_processes: None) -> None:
    """What it has started may be an export."""
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    ranks = LingeringRanks(10.0)
    assert not any(ranks.look(100.0 + second, {parent.pid: 1000.0}) for second in range(0, 100, 5))
    parent.communicate("\n")


def test_a_process_that_reads_and_writes_works(real_processes: None) -> None:
    """A few kilobytes a second, as over a slow line, take next to no CPU time; a byte a second may come from an idle thread."""
    code = (
        "import os, sys\nfor line in sys.stdin:\n    os.write(1, bytes(int(line)))\n    os.write(2, b'\\n')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    with process:
        stdin, stderr = process.stdin, process.stderr
        assert stdin is not None
        assert stderr is not None

        def looks(size: bytes) -> list[bool]:
            found = []
            for second in range(0, 900, 5):
                stdin.write(size + b"\n")
                stdin.flush()
                stderr.readline()
                found.append(ranks.look(start + second, {process.pid: 1000.0}))
            return found

        start, ranks = 100.0, LingeringRanks(1e9)
        assert not any(looks(b"8192"))
        start, ranks = 2000.0, LingeringRanks(1e9)
        assert any(looks(b"1"))
        stdin.close()


@pytest.mark.parametrize(
    ("waits", "frames", "is_asleep"),
    [
        ("time.sleep(60)", (Frame("/p/train.py", 3, "export"),), True),
        ("sys.stdin.read()", (Frame("/p/train.py", 3, "export"),), True),
        ("threading.Event().wait()", (Frame("/p/train.py", 3, "export"),), False),
        ("time.sleep(60)", (), False),
        ("time.sleep(60)", (Frame(TORCH, 7, "destroy_process_group"),), False),
    ],
)
def test_code_of_the_job_that_sleeps_is_told_from_a_deadlock(
    real_processes: None, waits: str, frames: tuple[Frame, ...], *, is_asleep: bool
) -> None:
    """By the kernel's word of what the main thread waits for: a time and input come, a lock may not."""
    code = f"import sys, threading, time\nprint(flush=True)\n{waits}"
    worker = StalledWorker("n0", 1, "script", 0, 300.0, 300.0, "S", frames, (), "/log")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 10
        while sleeps(worker, process.pid) != is_asleep and time.monotonic() < deadline:
            time.sleep(0.05)
        assert is_asleep == sleeps(worker, process.pid)
        process.kill()


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ((), False),
        ((Frame("/p/train.py", 3, "main"),), False),
        ((Frame(TORCH, 5, "barrier"), Frame("/p/train.py", 3, "main")), True),
        ((Frame(TORCH, 9, "_shutdown"), Frame(TORCH, 7, "destroy_process_group")), False),
    ],
)
def test_a_rank_in_a_collective_has_not_ended_well(frames: tuple[Frame, ...], waits: bool) -> None:
    """One whose process group is being destroyed, or whose process is ending, has."""
    worker = StalledWorker("n0", 1, "script", 0, 300.0, 300.0, "S", frames, (), "/log")
    assert waits == waits_for_peers(worker)
