"""One agent with real workers from a real fork server, and the supervisor's channel in the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from elasticflow.launcher.agent import flight_recorder
from elasticflow.launcher.agent.agent import Agent, build_agent, gone_s
from elasticflow.launcher.agent.agent_process import AgentConfig
from elasticflow.launcher.agent.flight_recorder import FlightRecorder
from elasticflow.launcher.agent.worker_heartbeats import HangTimeouts, WorkerHeartbeats
from elasticflow.launcher.agent.workers import ForkedWorkers
from elasticflow.launcher.fork_server.protocol import Setup
from elasticflow.launcher.fork_server.server_process import HelperLostError
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.protocol.child_processes import Program
from elasticflow.protocol.messages import (
    DevicesChecked,
    LogLines,
    NodeReady,
    Stacks,
    Standstill,
    WorkersEnded,
    WorkersStarted,
)
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.client.writer_process import WriterStart
from tests.command_line import forks
from tests.launcher.conftest import Warm, is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.protocol.messages import Message
    from elasticflow.snapshots.client.writer_process import WriterProcess

pytestmark = pytest.mark.usefixtures("real_processes")

HANG_S = 0.6
M = TypeVar("M")


@dataclass
class Node:
    """An agent that runs in a thread, and what it has told the supervisor so far."""

    channel: AgentChannel
    agent: Agent
    warm: Warm
    folder: RunFolder
    thread: threading.Thread
    told: list[Message] = field(default_factory=list)
    lost: list[HelperLostError] = field(default_factory=list)

    def form(self, generation: int, code: str) -> None:
        """Have the agent form *generation* of two workers that run *code*, and wait until they have started."""
        self.warm.write("import os, pathlib, signal, sys, time\n" + textwrap.dedent(code))
        self.channel.form(generation, (("n0", 2),), None)
        self.message(WorkersStarted, generation)

    def message(self, message_type: type[M], generation: int | None = None) -> M:
        """Return the agent's first message of that type, for *generation* if one is given."""

        def found() -> list[M]:
            self.told += self.channel.take()
            return [
                m
                for m in self.told
                if isinstance(m, message_type)
                and (generation is None or cast("Any", m).generation == generation)
            ]

        wait_until(found)
        return found()[0]

    def ended(self, generation: int) -> tuple[bool, list[tuple[int, bool]]]:
        """Return whether the generation failed, and each rank's exit code and whether the agent ended it."""
        message = self.message(WorkersEnded, generation)
        return message.failed, [(w.exit_code, w.ended_by_us) for w in message.workers]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def node(warm: Warm, tmp_path: Path, temporary: Path) -> Iterator[Node]:
    """Yield an announced agent; afterwards it has left and its thread is gone."""
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "train.py").symlink_to(warm.entry_point)
    listener = listen("127.0.0.1", 0)
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    folder = RunFolder(tmp_path / "runs" / "job" / "run")
    config = AgentConfig(
        setup=Setup(str(launch / "train.py"), log=str(tmp_path / "agent.log")),
        run_folder=str(folder.path),
        node="n0",
        rendezvous=address.url,
        hang_timeout_s=HANG_S,
        grace_s=1,
        writer=WriterStart(str(folder.path), folder.run_id),
    )
    channel = AgentChannel(StoreServer(listener).store(address.prefix))
    readable, writable = os.pipe()  # a writer that never says anything
    writer = SimpleNamespace(
        process=SimpleNamespace(pid=0),
        exit_code=lambda: None,
        address="",
        fileno=lambda: readable,
        reports=list,
        finish=lambda _: None,
        load_ahead=lambda: None,
    )
    heartbeats = WorkerHeartbeats(3600)
    agent = build_agent(config, warm.server, cast("WriterProcess", writer), heartbeats)
    agent.announce()
    lost: list[HelperLostError] = []

    def run() -> None:
        try:
            agent.run()
        except HelperLostError as error:
            lost.append(error)

    made = Node(channel, agent, warm, folder, threading.Thread(target=run, daemon=True), lost=lost)
    made.thread.start()
    yield made
    channel.stop()
    made.thread.join(60)
    stopped = not made.thread.is_alive()
    if agent._workers is not None:
        agent._workers.close(signal.SIGKILL, timeout=5)
    for descriptor in (readable, writable, heartbeats.fd):
        os.close(descriptor)
    heartbeats._memory.close()
    assert stopped


def test_failure_ends_the_group_at_once(node: Node) -> None:
    """Survivors that ignore TERM, as ranks in a collective do, are killed without waiting; torch 2.13 waits 30 s."""
    node.form(
        1,
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.2 if os.environ["RANK"] == "1" else 60)
        sys.exit(3)
        """,
    )
    began = time.monotonic()

    assert (True, [(-9, True), (3, False)]) == node.ended(1)
    assert time.monotonic() - began < 2


def test_group_that_leaves_by_itself_has_not_failed(node: Node, temporary: Path) -> None:
    """All workers left with code 0: nobody was ended by the agent, and no temporary file is left."""
    node.form(1, "os._exit(0)")

    assert (False, [(0, False), (0, False)]) == node.ended(1)
    assert [] == list(temporary.iterdir())


def test_streams_that_torchrun_would_tee_are_shown(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tee=0:1` of the launch: the first worker's output, after its name, to the last line of the last moment."""
    assert 2 == node.message(NodeReady).nproc
    node.form(1, 'print("rank", os.environ["RANK"], flush=True)\nos.write(1, b"last")\nos._exit(3)')
    assert node.ended(1)[0]

    assert ["[default0]:rank 0", "[default0]:last"] == [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("[default")
    ]


def test_root_cause_is_waited_for_a_moment(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that only noticed ends first; the one that caused it is still let end by itself."""
    # A busy machine may take longer than the moment to let the second one run at all.
    monkeypatch.setattr("elasticflow.launcher.agent.agent._ROOT_CAUSE_WAIT_S", 60)
    node.form(
        1,
        """
        if os.environ["RANK"] == "0":
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.05)
        raise ValueError("label 11 is no digit")
        """,
    )
    message = node.message(WorkersEnded, 1)

    assert [False, False] == [w.ended_by_us for w in message.workers]
    assert "ValueError: label 11 is no digit\n" == message.workers[1].stderr.splitlines(True)[-1]


def test_each_generation_has_its_number_logs_and_workers(node: Node) -> None:
    """The number is the supervisor's: torch 2.13's restart count differs between nodes and does not rise on a join."""
    report = """
        sys.stderr.write(os.environ["ELASTICFLOW_GENERATION"] + " " + os.environ["RANK"] + "\\n")
        sys.exit(int(os.environ["ELASTICFLOW_GENERATION"] == "4"))
    """
    node.form(4, report)
    assert node.ended(4)[0]
    node.form(9, report)
    assert not node.ended(9)[0]

    said = {(g, r): node.folder.rank_log(g, r, "stderr").read_text() for g in (4, 9) for r in (0, 1)}
    assert {(g, r): f"{g} {r}\n" for g in (4, 9) for r in (0, 1)} == said
    pids = [{w.pid for w in node.message(WorkersStarted, g).workers} for g in (4, 9)]
    assert not pids[0] & pids[1]


def test_workers_have_the_variables_that_torchrun_gives(node: Node) -> None:
    """The second node of two: names and values are torch 2.13's own, with the supervisor's store as master."""
    files = [node.folder.path.parent / name for name in ("bare", "3", "4")]
    node.warm.write(
        f"""
import json, os, pathlib
path = pathlib.Path({str(files[0].parent)!r}, os.environ.get("RANK", "bare"))
path.write_text(json.dumps(dict(os.environ)))
os._exit(0)
"""
    )
    node.channel.form(5, (("n9", 3), ("n0", 2)), 12.5)
    assert (False, [(0, False), (0, False)]) == node.ended(5)
    pid = node.warm.server.spawn(0, {}, os.devnull, os.devnull)  # what the server has of its own
    wait_until(lambda: not is_alive(pid))
    bare, *whole = [json.loads(file.read_text()) for file in files]
    given = [
        {name: value for name, value in each.items() if (name, value) not in bare.items()} for each in whole
    ]

    (failed_at,) = {each.pop("ELASTICFLOW_FAILED_AT") for each in given}
    assert 12.5 <= float(failed_at) < time.monotonic()
    address = StoreAddress.parse(node.agent._config.rendezvous)
    same = {
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "5",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(address.port),
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTICFLOW_RUN_ID": "run",
        "ELASTICFLOW_RUN_FOLDER": str(node.folder.path),
        "ELASTICFLOW_GENERATION": "5",
        "ELASTICFLOW_NODE": "n0",
        "ELASTICFLOW_RENDEZVOUS": address.url,
        "ELASTICFLOW_WRITER": "",
        "ELASTICFLOW_NUMA": "",
        "ELASTICFLOW_HEARTBEAT_FD": str(node.agent._heartbeats.fd),
    }
    assert [
        {"RANK": "3", "LOCAL_RANK": "0", "ROLE_RANK": "3", **same},
        {"RANK": "4", "LOCAL_RANK": "1", "ROLE_RANK": "4", **same},
    ] == given


def test_drain_reaches_every_worker(node: Node) -> None:
    """The supervisor's request becomes a TERM to each worker; leaving is their own business."""
    node.form(
        1,
        """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(60)
        """,
    )
    node.channel.request("drain", 1)

    assert (False, [(0, False), (0, False)]) == node.ended(1)


def test_standstill_is_told_and_then_the_stacks(node: Node) -> None:
    """Every rank that is asked writes its stacks, also one that is stopped; and nothing is killed unasked."""
    node.agent._heartbeats.hang_timeouts = HangTimeouts(HANG_S)
    node.form(
        1,
        """
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        def read_a_label():
            time.sleep(60)
        read_a_label()
        """,
    )
    assert node.message(Standstill).is_so
    node.channel.request("stacks", 1)
    stacks = node.message(Stacks).workers

    assert [("n0", 0, "start"), ("n0", 1, "start")] == [(s.node, s.rank, s.phase) for s in stacks]
    assert [False, True] == [s.state == "T" for s in stacks]
    assert "read_a_label" == stacks[0].frames[0].function
    assert stacks[0].seconds >= HANG_S
    for rank in range(2):
        assert "most recent call first" in node.folder.rank_log(1, rank, "stderr").read_text()
    node.channel.request("stop", 1)
    assert (False, [(-9, True), (-9, True)]) == node.ended(1)


def test_worker_that_a_signal_stopped_is_told_long_before_others_would_be(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker moves until then, and the limit of a hang is far; once it runs again nothing is wrong."""
    monkeypatch.setattr("elasticflow.launcher.agent.agent.STOPPED_S", HANG_S)
    node.agent._heartbeats.hang_timeouts = HangTimeouts(1000)
    node.form(
        1,
        """
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        """,
    )

    def told() -> list[tuple[bool, bool]]:
        node.told += node.channel.take()
        return [(each.is_so, each.is_one_stopped) for each in node.told if isinstance(each, Standstill)]

    wait_until(lambda: told() == [(True, True)])
    node.channel.request("stacks", 1)
    assert ["S", "T"] == [each.state for each in node.message(Stacks).workers]
    assert 1000 == node.agent._heartbeats.hang_timeouts.of("start")

    os.kill(next(w.pid for w in node.message(WorkersStarted).workers if w.rank == 1), signal.SIGCONT)
    wait_until(lambda: told() == [(True, True), (False, False)])
    node.channel.request("stop", 1)
    assert (False, [(-9, True), (-9, True)]) == node.ended(1)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the installed torch count as having NCCL."""
    monkeypatch.setattr(flight_recorder, "has_nccl", lambda: True)
    monkeypatch.setattr(flight_recorder, "DRIVERS", ("/dev/null",))


LISTENS = """
import threading
rank = os.environ["RANK"]
def listen():
    # As torch does it in its monitor's thread; here NCCL does not run, and the record is a word.
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    while not os.read(reader, 128):
        time.sleep(0.1)
    time.sleep(0.3)
    pathlib.Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank).write_text("recorded by " + rank)
if rank == "0":  # the other has no process group of NCCL's yet
    threading.Thread(target=listen, daemon=True).start()
time.sleep(60)
"""


def test_flight_recorders_are_dumped_with_the_stacks(
    with_nccl: None,
    node: Node,
    temporary: Path,  # in this order: the agent asks at its start
) -> None:
    """A worker with a pipe dumps what it has recorded before it is killed; one without is not waited for."""
    node.agent._heartbeats.hang_timeouts = HangTimeouts(HANG_S)
    node.form(1, LISTENS)
    assert node.message(Standstill).is_so
    node.channel.request("stacks", 1)
    stacks = node.message(Stacks).workers
    node.channel.request("stop", 1)

    assert (False, [(-9, True), (-9, True)]) == node.ended(1)
    dump = node.folder.generation_logs(1) / "flight_recorder" / "rank_0"
    assert [str(dump), ""] == [worker.dump for worker in stacks]
    assert "recorded by 0" == dump.read_text()
    assert [] != list(temporary.glob("ef-*/rank0.pipe"))
    node.form(2, "os._exit(0)")
    assert not node.ended(2)[0]
    assert [] == list(temporary.glob("ef-*/rank0.pipe"))


def test_launch_that_arranges_for_dumps_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that switches the recorder off; a torch without NCCL has none."""
    logs = Path("logs")
    assert {} == FlightRecorder({}).variables(logs)  # torch for processors
    monkeypatch.setattr(flight_recorder, "has_nccl", lambda: True)
    monkeypatch.setattr(flight_recorder, "DRIVERS", ("/dev/null",))
    for variable, value in (
        (flight_recorder.PIPE, "/x"),
        (flight_recorder.DUMP, "/y"),
        ("TORCH_FR_BUFFER_SIZE", "0"),
    ):
        assert {} == FlightRecorder({variable: value}).variables(logs)


def test_machine_without_a_driver_gets_no_pipes(
    with_nccl: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    """A job on the CPU, with a torch for GPUs, leaves nothing in the temporary folder, though its agent is killed."""
    monkeypatch.setattr(flight_recorder, "DRIVERS", ("/dev/none",))
    assert {} == FlightRecorder({}).variables(tmp_path / "logs")
    assert [] == list(temporary.iterdir())


@pytest.mark.usefixtures("with_nccl")
def test_workers_train_without_flight_recorders_where_no_pipe_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder for temporary files is full, or may not be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert {} == FlightRecorder({}).variables(tmp_path / "logs")


def test_dump_that_torch_writes_unasked_finds_its_folder(
    with_nccl: None, tmp_path: Path, temporary: Path
) -> None:
    """Torch 2.13 opens the file and makes no folder; it would drop the record with a line in the log."""
    assert gone_s({}) > gone_s({"ELASTICFLOW_DEVICE": "cpu"})  # the driver gives pinned memory back
    assert {} == FlightRecorder({"ELASTICFLOW_DEVICE": "cpu"}).variables(tmp_path / "logs")
    recorder = FlightRecorder({})
    Path(recorder.variables(tmp_path / "logs")[flight_recorder.DUMP] + "0").write_text("recorded")
    recorder.end()


@pytest.fixture
def checks_fork() -> Iterator[None]:
    """Have checks of devices be forks: a fresh interpreter would import torch."""
    with forks():
        yield


@pytest.mark.usefixtures("checks_fork")
def test_devices_are_checked_between_generations(node: Node) -> None:
    """The whole check in its own process, on a machine without a device: no sum, no fault; it runs once, for its node alone."""
    node.form(1, "os._exit(1)")
    assert node.ended(1)[0]
    node.channel.check_devices(("n7", "n0"), 1)
    found = node.message(DevicesChecked, 1)
    assert ("n0", 0, ()) == (found.node, found.devices, found.faults)

    node.form(2, "os._exit(0)")
    assert not node.ended(2)[0]
    node.channel.check_devices(("n7",), 2)
    node.form(3, "os._exit(0)")
    assert not node.ended(3)[0]
    assert 1 == len([message for message in node.told if isinstance(message, DevicesChecked)])


@pytest.mark.usefixtures("checks_fork")
def test_new_agent_checks_devices_after_another_agent_s_generation(node: Node) -> None:
    """The supervisor listed snapshots between the failure and its request, and the agent was started again meanwhile."""
    node.channel.check_devices(("n0",), 7)
    assert 7 == node.message(DevicesChecked).generation


@pytest.mark.parametrize(
    ("state", "is_server_lost", "remains"),
    [("D", False, "D"), ("R", False, ""), ("Z", False, ""), ("D", True, "")],
)
def test_worker_that_a_kill_does_not_end_is_told_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, state: str, is_server_lost: bool, remains: str
) -> None:
    """The kernel keeps a process in a driver's call; one that runs gives memory back, and a lost server tells no end."""
    monkeypatch.setattr("elasticflow.launcher.agent.workers.state_of", lambda _: state)
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        server = SimpleNamespace(exits={}, spawn=lambda *_: sleeper.pid, pump=lambda _=0: not is_server_lost)
        files = {0: tmp_path / "0"}
        streams = SimpleNamespace(stdouts=files, stderrs=files, close=lambda: None)
        workers = ForkedWorkers(cast("Any", server), {0: {}}, cast("Any", streams))
        workers.start()
        monkeypatch.setattr("elasticflow.launcher.agent.workers._KILLED_S", 0.1)
        workers.close(signal.SIGKILL, 0.1)
        [end] = workers.ends({0: 4}, ())
        assert (4, sleeper.pid, True, remains) == (end.rank, end.pid, end.ended_by_us, end.remains)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_stop_of_a_generation_kills_its_workers(node: Node) -> None:
    """A peer node has failed: the workers of this one go, and that is no failure of its own."""
    node.form(1, "time.sleep(60)")
    pids = [w.pid for w in node.message(WorkersStarted, 1).workers]
    node.channel.request("stop", 1)

    assert (False, [(-9, True), (-9, True)]) == node.ended(1)
    assert not any(is_alive(pid) for pid in pids)


def test_generation_is_stopped_although_rank_0_s_node_never_told_its_address(node: Node) -> None:
    """It was lost in that moment: no worker of the script has started here, and the next generation may come."""
    setup = replace(node.agent._config.setup, script=Program("train.py", "train.py", "", (), "."))
    node.agent._config = replace(node.agent._config, setup=setup)
    node.channel.form(1, (("n9", 2), ("n0", 2)), None)
    time.sleep(0.2)
    node.channel.request("stop", 1)

    assert (False, []) == node.ended(1)
    assert not any(isinstance(message, WorkersStarted) for message in node.told)
    node.agent._config = replace(node.agent._config, setup=replace(setup, script=None))
    node.form(2, "os._exit(0)")
    assert not node.ended(2)[0]


def test_close_leaves_a_process_alone_that_got_a_worker_s_id(tmp_path: Path) -> None:
    """One rank may end hours before the others: its id may be an unrelated session's by then."""
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        exits = {stranger.pid: (0, time.time())}
        server = SimpleNamespace(exits=exits, spawn=lambda *_: stranger.pid, pump=lambda _=0: True)
        files = {0: tmp_path / "0"}
        streams = SimpleNamespace(stdouts=files, stderrs=files, close=lambda: None)
        workers = ForkedWorkers(cast("Any", server), {0: {}}, cast("Any", streams))
        workers.start()
        workers.close(signal.SIGKILL, 0.1)
        time.sleep(0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("is_idle", [True, False])
def test_agent_leaves_when_the_writer_has_ended(node: Node, *, is_idle: bool) -> None:
    """Between generations as within one, where what its workers say is only what follows from it."""
    if not is_idle:
        node.form(1, "time.sleep(60)")
    cast("Any", node.agent._writer).exit_code = lambda: -9
    wait_until(lambda: node.lost)

    assert ["its snapshot writer was killed by SIGKILL"] == [str(error) for error in node.lost]


def test_lines_of_the_rank_logs_come_before_the_end(node: Node) -> None:
    """What a worker logged right before it left is told before its end is, more than the store takes in one piece too."""
    node.form(
        1,
        """
        folder = pathlib.Path(os.environ["ELASTICFLOW_RUN_FOLDER"]) / "logs" / "g0001"
        line = '{"event": "training.finished", "origin": "elasticflow", "rank": ' + os.environ["RANK"] + '}\\n'
        long = '{"event": "worker.raised", "origin": "elasticflow", "rank": 2, "error": "' + "x" * 300_000 + '"}\\n'
        (folder / ("rank" + os.environ["RANK"] + ".jsonl")).write_text(40 * long + line)
        os._exit(0)
        """,
    )
    node.message(WorkersEnded, 1)

    assert isinstance(node.told[-1], WorkersEnded)
    ranks = sorted(line["rank"] for m in node.told if isinstance(m, LogLines) for line in m.lines)
    assert [0, 1, *(80 * [2])] == ranks


@pytest.mark.e2e
def test_agent_imports_nothing_in_the_middle_of_a_failure() -> None:
    """All that it needs then was imported before it told that it was ready."""
    program = Path(__file__).with_name("programs") / "agent_imports.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
