"""Workers that are ready before they are needed, as real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent.workers import GroupState
from elasticflow.launcher.fork_server import standby
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Prepare, Setup, StandbyEnded
from elasticflow.launcher.fork_server.standby import LowPriority, Standbys
from elasticflow.protocol.run_files import Preparation
from elasticflow.protocol.worker_environment import HEARTBEAT, HEARTBEAT_SLOT
from elasticflow.system.processes import children_of
from tests.launcher.conftest import Warm, close, is_alive, kill, wait_until
from tests.launcher.fork_server.test_server import ended, group_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")

# What the job's code tells of the process that runs it.
TOLD = """
import json, os, pathlib, signal, sys
facts = {
    "pid": os.getpid(),
    "leads": os.getsid(0) == os.getpid(),
    "rank": os.environ["RANK"],
    "model": getattr(sys.modules.get("model"), "RANK", "not imported"),
    "usual": signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGPROF) == signal.SIG_DFL,
    "main": __name__,
    "blocks_term": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
}
pathlib.Path(os.environ["FACTS"]).write_text(json.dumps(facts))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """Yield a server that starts workers anew, as where they cannot be forked; its jobs tell of themselves."""
    (tmp_path / "train.py").write_text(TOLD)
    (tmp_path / "model.py").write_text("RANK = 'any'\n")
    (tmp_path / "ranked.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    server = ForkServer.start(Setup(str(tmp_path / "train.py"), (str(tmp_path),), start_method="spawn"))
    server.wait_ready()
    yield server
    close(server)


@pytest.fixture
def heartbeats() -> Iterator[int]:
    """Yield the heartbeats of one worker."""
    descriptor = os.memfd_create("test-heartbeats", 0)
    os.ftruncate(descriptor, HEARTBEAT_SLOT)
    yield descriptor
    os.close(descriptor)


def is_ready(server: ForkServer) -> bool:
    """Whether the standby of local rank 0 is."""
    return server.pump() and 0 in server.standbys


def run_worker(server: ForkServer, folder: Path) -> dict[str, object]:
    """Return what the worker of rank 3 tells, run to its end."""
    facts = folder / "facts.json"
    group = group_of(server, folder, {0: {"RANK": "3", "FACTS": str(facts)}})
    group.start()
    assert ended(group) is GroupState.FINISHED, group.exits()
    told: dict[str, object] = json.loads(facts.read_text())
    assert told["pid"] == group.pids()[0]
    return told


def test_a_standby_becomes_the_worker_with_its_imports_done(server: ForkServer, tmp_path: Path) -> None:
    """Same process, a session of its own, the worker's rank; a module that reads its rank is left to the worker."""
    server.prepare(0, 1, Preparation(["json", "model", "ranked", "no_such_module"]), None)
    wait_until(lambda: is_ready(server))
    standby = server.standbys[0]
    assert standby.memory > 1 << 20

    told = run_worker(server, tmp_path)

    assert standby.pid == told.pop("pid")
    usual = {"leads": True, "rank": "3", "usual": True, "main": "__main__", "blocks_term": True}
    assert {"model": "any", **usual} == told
    assert {} == server.standbys


def test_one_that_still_imports_is_taken_too(server: ForkServer, tmp_path: Path) -> None:
    """It is ahead of a worker that is started now; and the worker after it, which has no standby, is started as ever."""
    server.prepare(0, 1, Preparation(["model"]), None)
    assert "any" == run_worker(server, tmp_path)["model"]
    assert "not imported" == run_worker(server, tmp_path)["model"]


def test_a_standby_that_dies_before_it_reads_anything_is_told_too(server: ForkServer) -> None:
    """The kernel resets its connection then: the server, and all workers with it, must not end of that."""
    server.prepare(0, 1, Preparation([]), None)
    wait_until(lambda: children_of(server.process.pid))
    os.kill(children_of(server.process.pid)[0], signal.SIGKILL)
    wait_until(lambda: not server.pump() or server.ended_standbys)

    assert [(0, -signal.SIGKILL)] == [(report.local_rank, report.code) for report in server.ended_standbys]


def test_a_standby_for_which_there_is_no_room_is_told_as_one_that_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as where a container may have no more processes: the workers go on without it."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        standbys = Standbys("fork", ours)
        monkeypatch.setattr(os, "fork", refuse)
        prepare = Prepare(3, 4, Preparation([]), (), 0, "train.py")
        assert StandbyEnded(3, 1) == standbys.start(prepare)
        assert StandbyEnded(3, 1) == standbys.start(prepare)
    assert [] == standbys.descriptors()
    assert "no standby of local rank 3: " in capsys.readouterr().err


def test_a_rank_has_one_standby_and_its_death_is_told(warm: Warm) -> None:
    """It counts as no worker's; another one can be asked for."""
    server = warm.server
    server.ended_standbys.clear()
    server.prepare(0, 1, Preparation([]), None)
    server.prepare(0, 1, Preparation([]), None)
    wait_until(lambda: is_ready(server))
    first = server.standbys[0].pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: server.pump() and server.ended_standbys)
    (report,) = server.ended_standbys
    assert (0, -signal.SIGKILL) == (report.local_rank, report.code)
    assert {} == server.standbys
    assert first not in server.exits

    server.prepare(0, 1, Preparation([]), None)
    wait_until(lambda: is_ready(server))
    second = server.standbys[0].pid
    assert first != second
    kill(second)
    wait_until(lambda: server.pump() and not server.standbys)


def test_standbys_end_with_the_server(server: ForkServer) -> None:
    """Nobody's orphans: ready or not."""
    server.prepare(0, 1, Preparation([]), None)
    wait_until(lambda: is_ready(server))
    standby = server.standbys[0].pid
    kill(server.process.pid)
    wait_until(lambda: not is_alive(standby))


def test_low_priority_takes_pauses_and_waits_for_snapshots(heartbeats: int) -> None:
    """It works a third of the time at most, not at all during a copy, and without a pause once it is needed."""
    ours, theirs = socket.socketpair()

    def share_of_cpu(seconds: float) -> float:
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            pass
        return (time.process_time() - cpu) / (time.monotonic() - began)

    with ours, theirs, LowPriority(ours, heartbeats, 1):
        assert share_of_cpu(0.6) < 0.5
        os.pwrite(heartbeats, HEARTBEAT.pack(1, 1, b"snapshot"), 0)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:  # the copy is over after a second
            time.sleep(1)
            os.pwrite(heartbeats, HEARTBEAT.pack(2, 1, b"step"), 0)
            os._exit(0)
        cpu = time.process_time()
        while time.process_time() - cpu < 0.1:
            pass
        assert time.monotonic() - began > 0.9
        os.waitpid(pid, 0)
        theirs.send(b"needed")
        os.pwrite(heartbeats, HEARTBEAT.pack(3, 1, b"snapshot"), 0)
        cpu = time.process_time()
        while time.process_time() - cpu < 0.1:
            pass
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


@pytest.mark.parametrize(("device", "is_opened"), [("cuda", True), ("cpu", False), ("", False)])
def test_a_gpu_is_opened_where_the_last_workers_trained_on_one(
    monkeypatch: pytest.MonkeyPatch, device: str, *, is_opened: bool
) -> None:
    """A job may train on the CPU of a machine with GPUs; a worker that has opened one could not."""
    from elasticflow.runtime.process import standby_device

    asked: list[tuple[object, ...]] = []

    def open_device(*arguments: object) -> str:
        asked.append(arguments)
        return "its reason"

    monkeypatch.setattr(standby_device, "open_device", open_device)
    prepare = Prepare(1, 2, Preparation([], {"CUBLAS_A": "1"}, device), (), 0, "", has_gpu=True)
    assert ("its reason" if is_opened else "") == standby._open_device(prepare)
    assert ([("cuda", 1, 2, {"CUBLAS_A": "1"})] if is_opened else []) == asked
