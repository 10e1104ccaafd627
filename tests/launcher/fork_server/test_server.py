"""The fork server and its workers, as real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from elasticflow.launcher.agent.worker_streams import WorkerStreams
from elasticflow.launcher.agent.workers import ForkedWorkers, GroupState
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Setup, TorchrunOptions, TorchrunRefusedError
from elasticflow.launcher.fork_server.server_process import HelperLostError
from elasticflow.run_folder import RunFolder
from elasticflow.runtime.process import random_streams
from tests.launcher.conftest import Warm, close, is_alive, kill, wait_until

pytestmark = pytest.mark.usefixtures("real_processes")

ROOT = Path(__file__).parents[3]

# As a loader child does: forked by the worker, in its session, not ended by what ends the worker alone.
CHILD = """
import os, pathlib, time
def child():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    pathlib.Path(os.environ["PID_FILE"]).write_text(str(pid))
"""


def ended(group: ForkedWorkers) -> GroupState:
    """Return how the group ended."""
    wait_until(lambda: group.poll() is not GroupState.RUNNING)
    return group.poll()


def group_of(server: ForkServer, folder: Path, environments: dict[int, dict[str, str]]) -> ForkedWorkers:
    """Return workers whose global ranks are their local ones, not yet started."""
    run = RunFolder(folder / "runs" / "job" / "run")
    streams = WorkerStreams(run, 0, {rank: rank for rank in environments}, TorchrunOptions(nproc=1), "n0")
    return ForkedWorkers(server, environments, streams)


@pytest.fixture
def start(warm: Warm, tmp_path: Path) -> Any:
    """Return what starts a group of workers that run *code*, with variables of their own."""

    def begin(code: str, workers: int = 2, **variables: str) -> ForkedWorkers:
        warm.write(textwrap.dedent(code))
        envs = {rank: {"RANK": str(rank), **variables} for rank in range(workers)}
        group = group_of(warm.server, tmp_path, envs)
        group.start()
        return group

    return begin


def test_workers_that_leave_by_os_exit_end_the_group_in_under_a_second(start: Any) -> None:
    """Exit code 0 is success; torch 2.13's own context waits for ever for a return value (its MultiprocessContext)."""
    began = time.monotonic()
    group = start("import os, torch; torch.ones(2).sum(); os._exit(0)")

    assert ended(group) is GroupState.FINISHED
    assert time.monotonic() - began < 1.0


def test_the_jobs_modules_may_hold_a_thousand_files_open(start: Any) -> None:
    """Those that come after them have numbers that `select` does not take."""
    group = start("import os, holds_files; os._exit(0 if max(holds_files.held) > 1023 else 1)")

    assert ended(group) is GroupState.FINISHED


def test_exit_codes_and_signals_are_told_by_rank(start: Any) -> None:
    """Codes as they are, signals as negative numbers, an exception as 1 with its traceback in the rank's own log."""
    group = start(
        """
        import os, signal, sys
        match os.environ["RANK"]:
            case "0": sys.exit(3)
            case "1": os.kill(os.getpid(), signal.SIGKILL)
            case "2": raise ValueError("no such layer")
            case "3": sys.exit("in words")
            case "4": pass
        """,
        workers=5,
    )
    wait_until(lambda: (group.poll(), len(group.exits()))[1] == 5)

    assert {0: 3, 1: -9, 2: 1, 3: 1, 4: 0} == {rank: code for rank, (code, _) in group.exits().items()}
    assert group.streams.stderrs[2].read_text().endswith("ValueError: no such layer\n")
    assert group.poll() is GroupState.FAILED


def test_what_the_jobs_modules_draw_at_import_follows_from_the_seed(start: Any, tmp_path: Path) -> None:
    """In the server, which imports them once, and in a worker, which imports again what the server could not keep."""
    code = """
        import os, random, sys
        import draws_at_import
        seen = [draws_at_import.drawn]
        del sys.modules["draws_at_import"]
        import draws_at_import
        open(os.environ["SEEN"], "w").write(repr([*seen, draws_at_import.drawn]))
    """
    ended(start(code, workers=1, SEEN=str(tmp_path / "seen")))
    key = random_streams._factory_key(7, "import draws_at_import")
    assert [random.Random(key).random()] * 2 == json.loads((tmp_path / "seen").read_text())


def test_process_ids_come_again(start: Any, warm: Warm) -> None:
    """A run that restarts often meets the id of an earlier worker, whose end is not the new one's."""
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    earlier = dict.fromkeys(range(last, last + 5000), (1, time.time()))
    warm.server.exits.update(earlier)
    try:
        group = start("import time\ntime.sleep(0.1)")
        ended(group)
        codes = {rank: code for rank, (code, _) in group.exits().items()}
    finally:
        for pid in earlier:
            warm.server.exits.pop(pid, None)

    assert {0: 0, 1: 0} == codes


def test_server_ignores_signals_to_its_group(start: Any, warm: Warm) -> None:
    """A signal to the whole process group must not end it: its workers would die in the middle of a drain."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(warm.server.process.pid, number)
    assert ended(start("pass")) is GroupState.FINISHED
    assert warm.server.process.poll() is None


def test_workers_have_the_usual_signals_and_a_session_of_their_own(start: Any, tmp_path: Path) -> None:
    """What the server ignores is not inherited: Ctrl-C in user code works, and reaches no worker from a terminal."""
    group = start(
        """
        import json, os, pathlib, signal
        facts = [os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                 signal.getsignal(signal.SIGINT) == signal.SIG_DFL, __name__, len(os.sched_getaffinity(0)) > 0]
        pathlib.Path(os.environ["FACTS"]).write_text(json.dumps(facts))
        """,
        workers=1,
        FACTS=str(tmp_path / "facts"),
    )
    ended(group)

    assert [True, True, True, "__main__", True] == json.loads((tmp_path / "facts").read_text())


def test_term_between_fork_and_join_waits(start: Any, tmp_path: Path) -> None:
    """A drain asked for while the worker still imports is delivered to the handler of `worker.join`, not fatal."""
    group = start(
        """
        import os, pathlib, time, types
        pathlib.Path(os.environ["READY"]).touch()
        time.sleep(0.5)
        from elasticflow.runtime import worker
        from elasticflow.runtime.process.votes import Vote
        me = types.SimpleNamespace(vote=Vote(), identity=types.SimpleNamespace(started_by="launcher"))
        worker._listen(me)
        os._exit(7 if me.vote.leave_wanted else 0)
        """,
        workers=1,
        READY=str(tmp_path / "ready"),
    )
    wait_until((tmp_path / "ready").exists)
    group.send(signal.SIGTERM)
    ended(group)

    assert 7 == group.exits()[0][0]


def test_term_before_a_worker_runs_waits(start: Any, warm: Warm) -> None:
    """A drain that comes between the fork and the child's first line is not lost, though the server ignores the signal."""
    slow = warm.entry_point.with_name("slow")
    slow.touch()
    try:
        group = start(
            """
            import os, signal, time
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            time.sleep(5)
            """,
            workers=1,
        )
        group.send(signal.SIGTERM)
        ended(group)
    finally:
        slow.unlink()

    assert 7 == group.exits()[0][0]


def test_kill_of_a_group_takes_the_loader_processes_too(start: Any, tmp_path: Path) -> None:
    """A loader child holds its rank's sockets: left alive, peers notice the death after seconds (torch 2.13)."""
    pid_file = tmp_path / "pid"
    group = start(CHILD + "child()\ntime.sleep(60)", workers=1, PID_FILE=str(pid_file))
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    child = int(pid_file.read_text())
    group.close(signal.SIGKILL, timeout=5)

    try:
        assert {0: -9} == {rank: code for rank, (code, _) in group.exits().items()}
        assert wait_until(lambda: not is_alive(child), 2) < 1.0
    finally:
        kill(child)


def test_closed_group_takes_the_children_of_a_dead_worker(start: Any, tmp_path: Path) -> None:
    """The worker itself died first: what is left of its session goes all the same."""
    pid_file = tmp_path / "pid"
    group = start(CHILD + "child()\nos._exit(1)", workers=1, PID_FILE=str(pid_file))
    ended(group)
    child = int(pid_file.read_text())
    assert is_alive(child)
    group.close(signal.SIGKILL, timeout=5)

    try:
        wait_until(lambda: not is_alive(child), 2)
    finally:
        kill(child)


def test_close_goes_from_the_signal_to_kill_when_time_is_up(start: Any, tmp_path: Path) -> None:
    """A worker that ignores TERM is killed once the time given has passed; torch 2.13 waits 30 s on a restart."""
    group = start(
        """
        import os, pathlib, signal, time
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(os.environ["READY"]).touch()
        time.sleep(60)
        """,
        workers=1,
        READY=str(tmp_path / "ready"),
    )
    wait_until((tmp_path / "ready").exists)
    began = time.monotonic()
    group.close(signal.SIGTERM, timeout=1)

    assert {0: -9} == {rank: code for rank, (code, _) in group.exits().items()}
    assert 0.9 < time.monotonic() - began < 3


AGENT = """
import sys, time
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Setup
server = ForkServer.start(Setup(sys.argv[1], start_method=sys.argv[2]))
server.wait_ready()
worker = server.spawn(0, {}, "/dev/null", "/dev/null")
print(server.process.pid, worker, flush=True)
time.sleep(60)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_killed_agent_takes_server_and_workers_with_it(tmp_path: Path, start_method: str) -> None:
    """Kill -9 of the parent: nothing below it lives; torch 2.13 leaves orphans that train to the end."""
    entry_point = tmp_path / "train.py"
    ready = tmp_path / "ready"
    entry_point.write_text(f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)")
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(entry_point), start_method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert agent.stdout is not None
    pids = [int(pid) for pid in agent.stdout.readline().split()]
    wait_until(ready.exists)
    assert all(is_alive(pid) for pid in pids)
    agent.kill()
    agent.wait()
    agent.stdout.close()

    try:
        assert wait_until(lambda: not any(is_alive(pid) for pid in pids), 5) < 1.0
    finally:
        kill(*pids)


IMPORTING_AGENT = """
import sys, time
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Setup
server = ForkServer.start(Setup("train.py", (sys.argv[1],), ("slow",)))
print(server.process.pid, flush=True)
time.sleep(60)
"""


def test_killed_agent_takes_a_server_that_imports_with_it(tmp_path: Path) -> None:
    """It does not read the socket while it imports, so the end of that is no help: the death signal is."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    agent = subprocess.Popen(
        [sys.executable, "-c", IMPORTING_AGENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    time.sleep(0.3)
    assert is_alive(pid)
    agent.kill()
    agent.wait()
    agent.stdout.close()

    try:
        assert wait_until(lambda: not is_alive(pid), 5) < 2.0
    finally:
        kill(pid)


def test_killed_server_ends_the_agent_and_not_the_budget(tmp_path: Path) -> None:
    """The workers die with it, and the agent raises instead of calling it their failure: another one takes over."""
    entry_point = tmp_path / "train.py"
    entry_point.write_text("import time\ntime.sleep(60)")
    server = ForkServer.start(Setup(str(entry_point), start_method="spawn"))
    try:
        server.wait_ready()
        group = group_of(server, tmp_path, {0: {"RANK": "0"}})
        group.start()
        [pid] = group.pids().values()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not is_alive(pid), 5)

        with pytest.raises(HelperLostError, match="its fork server was killed by SIGKILL"):
            wait_until(lambda: group.poll() is GroupState.FAILED, 5)
        with pytest.raises(HelperLostError, match="its fork server was killed by SIGKILL"):
            server.spawn(0, {}, "/dev/null", "/dev/null")
    finally:
        close(server)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_server_that_a_signal_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:
    """It would start no worker and tell no end of one: another agent takes over, with a server of its own."""
    monkeypatch.setattr("elasticflow.system.processes.STOPPED_S", 0.5)
    monkeypatch.setattr("elasticflow.system.processes._LOOK_S", 0.1)
    server = ForkServer.start(Setup(str(tmp_path / "train.py"), start_method=start_method))
    try:
        serving = server.wait_ready().pid
        assert (serving == server.process.pid) is (start_method == "spawn")
        os.kill(serving, signal.SIGSTOP)
        with pytest.raises(HelperLostError, match="its fork server was killed by SIGKILL"):
            server.spawn(0, {}, "/dev/null", "/dev/null")
    finally:
        close(server)


def test_arguments_are_read_beside_a_server_that_imports_no_torch(tmp_path: Path) -> None:
    """A child of its does: where workers are started anew each of them imports torch, and the server need not."""
    arguments = ("--nproc-per-node=many", "train.py")
    server = ForkServer.start(Setup(str(tmp_path), start_method="spawn", arguments=arguments))
    try:
        with pytest.raises(TorchrunRefusedError, match="Unsupported nproc_per_node value: many"):
            server.options()
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        close(server)


def test_a_server_that_has_opened_the_accelerator_starts_workers_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the job's doing: something that this Python imports at its start. A fork could not use the GPU."""
    (tmp_path / "sitecustomize.py").write_text(
        "from elasticflow.launcher.fork_server import preload\npreload._open_files = lambda: ['/dev/nvidia-uvm']\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    code = "import os, sys\nopen(os.environ['SEEN'], 'w').write(str('torch' in sys.modules))\n"
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "model.py").write_text("")
    server = ForkServer.start(Setup(str(tmp_path / "train.py"), (str(tmp_path),), ("model",)))
    try:
        ready = server.wait_ready()
        group = group_of(server, tmp_path, {0: {"RANK": "0", "SEEN": str(tmp_path / "seen")}})
        group.start()
        assert ended(group) is GroupState.FINISHED
    finally:
        close(server)

    reason = "touches the accelerator at import: every worker is started anew instead of forked"
    assert ((("torch", reason),), False) == (ready.refused, ready.shares_imports)
    assert "False" == (tmp_path / "seen").read_text()
