"""Nodes of `scale.py`: many in one process, each with the connections, messages and snapshot writer of a real one.

    python -m tests.measured.benchmarks.scale_nodes PROJECT PORT NODES PAUSE_MS [served]

What is real of each node: how it finds the launch and its invitation (`join.await_launch`), its connections (`control_store.connect`), its
two outboxes, orders and requests as it reads them, the part of `join.JoinedNode` that looks for the launch's end, each
message (`protocol/messages.py`), the writer's threads and classes that write a shard, announce it and commit
(`ShardWriter`, `PendingSnapshots`, `Committer`). What stands for something else:

* no fork server and no workers: a thread of the node says what they would have said, with real pids of nobody;
* no process group: where ranks agree by a collective, the benchmark lets all of them continue at once;
* the agent's loop: the node's thread waits for the key server to send something, instead of looking fifty times a second;
* a node is lost as a machine says whose agent has died: that a silent one counts as lost after 2.5 s is left out;
* signs of life and looks for the end are given for several nodes by one thread, as often as each node would.

Commands come as lines of JSON on standard input, and what nodes have done goes to standard output.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from elasticflow import events
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.launcher.join import JoinedNode, await_launch, store_of_node
from elasticflow.launcher.rendezvous.invitation import Invitation
from elasticflow.launcher.rendezvous.leadership import connect, store_address_of
from elasticflow.launcher.rendezvous.liveness import BEAT_S
from elasticflow.launcher.rendezvous.store_keys import (
    INVITATION,
    ORDERS,
    beat_key,
    is_released,
    release_folder,
    request_key,
)
from elasticflow.launcher.rendezvous.supervisor_channel import Orders, Outbox
from elasticflow.launcher.rendezvous.token import given_token
from elasticflow.protocol import control_store
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.messages import (
    Activity,
    AgentDied,
    LogLines,
    NodeReady,
    NodeReports,
    StartedWorker,
    WorkerEnd,
    WorkersEnded,
    WorkersStarted,
)
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.client.messages import as_event
from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard, TensorEntry
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.storage.storage import Storage, several_at_a_time
from elasticflow.system.processes import die_with_parent
from tests.measured.benchmarks.scale_supervisor import JOB, RUN_ID, SERVED, job_of, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.launcher.rendezvous.supervisor_channel import Assignment
    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import Message
    from elasticflow.protocol.store_address import StoreAddress
    from elasticflow.protocol.tcp_store import TcpControlStore
    from elasticflow.snapshots.client.messages import WriterReport

# Nodes of a process that join at a time: more would only wait for each other, and give no sign of life meanwhile.
_JOINING = 8
_PULSE_THREADS = 4
_TENSOR = 1024  # bytes of each rank's shard
_LINES_S = 0.1
_AS_LONG_AS_IT_TAKES = 10_000.0


@dataclass
class Gates:
    """What the benchmark lets all nodes of this process do, by generation."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    opened: set[tuple[str, int]] = field(default_factory=set)

    def open(self, what: str, generation: int) -> None:
        """Let them."""
        with self.changed:
            self.opened.add((what, generation))
            self.changed.notify_all()

    def wait(self, what: str, generation: int) -> None:
        """Return once they may."""
        with self.changed:
            self.changed.wait_for(lambda: (what, generation) in self.opened, _AS_LONG_AS_IT_TAKES)


class CountingStorage(Storage):
    """A folder that counts what is asked of it, and answers after a pause, as a store on another machine does."""

    def __init__(self, uri: str, pause_s: float) -> None:
        super().__init__(uri)
        self.pause_s = pause_s
        self.operations = 0

    def map(self, action: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return what *action* gives for each of *items*, as a store on another machine is asked if this one is slow."""
        return several_at_a_time(action, items) if self.pause_s else list(super().map(action, items))

    def _do(self, what: str, path: str, action: Callable[[Any], Any], patience: Any = None) -> Any:
        self.operations += 1
        time.sleep(self.pause_s)
        return super()._do(what, path, action, patience)


class PatientOrders(Orders):
    """Orders, waited for without looking again and again."""

    def _wait_for(self, key: str, may_wait: Callable[[], None]) -> None:
        cast("TcpControlStore", self._store).get(key, limit_s=_AS_LONG_AS_IT_TAKES)


def await_any(store: ControlStore, keys: list[str]) -> str:
    """Return the first of *keys*, which the server sends by itself, that has a value, once one has."""
    mirrored = cast("TcpControlStore", store)
    mirror = mirrored._mirror
    paths = {mirrored._path(key).decode(): key for key in keys}
    while True:
        mirror._follow(60.0)
        for path, key in paths.items():
            if path in mirror._values:
                return key


class Node:
    """One node, with its threads."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number, self.name = host, number, f"host-{number:05d}-{number}"
        self.is_gone = self.trains = False
        self._posting = threading.Lock()
        self._writer: NodeWriter | None = None

    def run(self) -> None:
        """Join, take part in each generation, and leave when the launch is over or this node is killed."""
        try:
            with self.host.joining:
                self._join()
            self.host.nodes[self.name] = self
            while (assignment := self._orders.wait_for_next()) is not None:
                self._take_part(assignment)
            while self.joined._final is None:
                self.joined._look_for_end()
            self.leave()
            tell({"did": "left"})
        except Exception as error:  # noqa: BLE001  # a node that fails is told of, whatever it was
            if not self.is_gone:
                tell({"did": "failed", "node": self.name, "error": f"{type(error).__name__}: {error}"})

    def _join(self) -> None:
        address, folder = self.host.address, self.host.project
        socket.create_connection((address.host, address.port), timeout=60).close()
        self._keys = connect(address)
        number = await_launch(self._keys, address, 0, lambda _: None)
        launch = address.under(str(number))
        self._launch_store = self.host.store_of_node(launch)
        from_json(Invitation, json.loads(self._launch_store.get(INVITATION)))
        Catalog(Storage(str(folder))).read_job_record()
        self._launch_store.add("joined", 1)
        self.joined = JoinedNode(self.name, cast("AgentProcess", None), self._launch_store, lambda _: None)
        self.address = launch
        self.store = control_store.connect(launch, ORDERS)
        self.outbox = Outbox(self.store)
        self._orders = PatientOrders(self.store, self.name)
        for module in ("torch", ""):
            self.post(Activity(self.name, "import" if module else "", module))
        self.beats = control_store.connect(launch, release_folder(self.outbox.number))
        self.beats.set(beat_key(self.outbox.number), "0")
        self._orders.skip_old()
        self.post(NodeReady(self.name, f"host-{self.number:05d}.cluster.internal", 1))

    def post(self, message: Message) -> None:
        """Tell the supervisor."""
        with self._posting:
            self.outbox.post(message)

    def leave(self) -> None:
        """End all connections, as the end of the machine does."""
        self.is_gone = True
        self.host.nodes.pop(self.name, None)
        for store in (self.store, self.beats, self._launch_store, self._keys):
            cast("TcpControlStore", store).close()
        if self._writer is not None:
            self._writer.end()

    def _take_part(self, assignment: Assignment) -> None:
        generation, rank = assignment.generation, assignment.first_rank
        tell({"did": "formed", "generation": generation})
        self.host.gates.wait("start", generation)
        self.post(WorkersStarted(generation, self.name, (StartedWorker(rank, 1000 + rank, self.name),)))
        keys = control_store.connect(self.address.under(f"run/{generation}"))
        if rank == 0:
            keys.set("store", json.dumps(["10.0.0.1", 29500]))
        keys.get("store", _AS_LONG_AS_IT_TAKES)
        cast("TcpControlStore", keys).close()
        self.post(Activity(self.name, "restore", "", 0, 0.8))
        self._say(assignment, [self._line(assignment, events.ENVIRONMENT_FOUND, **self.host.environment)])
        self._begin_writer(assignment)
        tell({"did": "started", "generation": generation})
        self.host.gates.wait("train", generation)
        self.post(Activity(self.name, ""))
        threading.Thread(target=self._train, args=(assignment,), daemon=True).start() if rank == 0 else None
        asked = await_any(
            self.store,
            [request_key("drain", generation), request_key("stop", generation)],
        )
        self.trains = False
        has_drained = asked == request_key("drain", generation)
        end = WorkerEnd(rank, 1000 + rank, 0 if has_drained else -9, time.time(), not has_drained, False, "")
        self.post(WorkersEnded(generation, self.name, False, (end,), time.time()))

    def _train(self, assignment: Assignment) -> None:
        """Write what rank 0 writes: the first step's lines, then ten times a second one."""
        self.trains = True
        step = 10 * assignment.generation
        about = {"epoch": 0, "samples": 0, "steps": 10**6, "device": "cuda", "parameters": 10**9}
        about |= {"restored_from": None, "from_memory": False, "restore_s": None}
        self._say(assignment, [self._line(assignment, events.TRAINING_STARTED, step=step, **about)])
        first = {"step": step + 1, "seconds_since_failure": None}
        self._say(assignment, [self._line(assignment, events.TRAINING_FIRST_STEP, **first)])
        while self.trains and not self.is_gone:
            step += 1
            self._say(assignment, [self._step_line(assignment, step)])
            time.sleep(_LINES_S)

    def _step_line(self, assignment: Assignment, step: int) -> dict[str, Any]:
        facts = {"epoch": 0, "in_epoch": step, "samples": step, "loss": 1.0, "lr": 0.1, "time": time.time()}
        return self._line(assignment, events.STEP, step=step, seconds=_LINES_S, **facts)

    def _say(self, assignment: Assignment, lines: list[dict[str, Any]]) -> None:
        if not self.is_gone:
            self.post(LogLines(tuple(lines), None))

    def _line(self, assignment: Assignment, event: str, **fields: Any) -> dict[str, Any]:
        bound = {"job": JOB, "run_id": RUN_ID, "node": self.name, "world_size": assignment.world_size}
        bound |= {"rank": assignment.first_rank, "generation": assignment.generation, "level": "info"}
        return {"origin": events.OURS, "event": event, "timestamp": "2026-01-01T00:00:00Z", **bound, **fields}

    def _begin_writer(self, assignment: Assignment) -> None:
        if self._writer is not None:
            self._writer.end()
        self._writer = NodeWriter(self, assignment)

    def snapshot(self, name: str, step: int) -> None:
        """Write this rank's shard of a snapshot, announce it, and commit or wait for the commit."""
        assert self._writer is not None
        self._writer.write(name, step)

    def pulse(self, now: int) -> None:
        """Give a sign of life, and look whether this node was released."""
        self.beats.set(beat_key(self.outbox.number), str(now))
        if is_released(self.beats, self.outbox.number):
            raise RuntimeError("it counts as lost")


class NodeWriter:
    """What the writer process of a node does with its rank's shard, in this process."""

    def __init__(self, node: Node, assignment: Assignment) -> None:
        self._node, self._assignment = node, assignment
        start = WriterStart(str(node.host.folder), RUN_ID)
        catalog = Catalog(node.host.storage)
        self._pending_snapshots = PendingSnapshots()
        self._pending_snapshots.greet(assignment.generation, is_single_node=False)
        self._shard_writer = ShardWriter(start, catalog)
        committer = Committer(start, catalog, self._pending_snapshots, self._report)
        self._thread = threading.Thread(target=committer.run, daemon=True)
        self._thread.start()

    def write(self, name: str, step: int) -> None:
        """Hand the shard over, and write it."""
        rank, world_size = self._assignment.first_rank, self._assignment.world_size
        record = SnapshotRecord({"step": step}, ManifestFacts(trigger="steps")) if rank == 0 else None
        tensor = TensorEntry(f"layer.{rank}", "U8", (_TENSOR,), 0, _TENSOR)
        shard = StagedShard([tensor], _TENSOR, record)
        pending = PendingSnapshot(name, step, self._assignment.generation, world_size, 1)
        pending = self._pending_snapshots.add(pending, rank, record, None)
        files, error = [], None
        try:
            files = self._shard_writer.write(pending, rank, shard, memoryview(bytes(_TENSOR)))
        except OSError as caught:
            error = str(caught)
        self._pending_snapshots.finish(pending, rank, files, error)

    def end(self) -> None:
        """Have the committing thread end."""
        self._pending_snapshots.end_all()

    def _report(self, report: WriterReport, _listeners: Any, *, to_parent: bool) -> None:
        fields = as_event(report)
        tell({"did": fields["event"], "generation": self._assignment.generation})
        if to_parent:
            self._node.post(NodeReports((fields,)))


class Host:
    """The nodes of this process."""

    def __init__(self, project: Path, port: int, nodes: int, pause_s: float, *, is_served: bool) -> None:
        self.project = project
        self.folder = RunFolder.of(project, JOB, RUN_ID).path
        plan = plan_job(
            job_of(nodes, port, is_served=is_served), project_root=project, job_files=(project / "job.toml",)
        )
        token = given_token(plan.token_file, project)
        self.address = store_address_of(plan, "127.0.0.1", port, token)
        self.storage = CountingStorage(str(self.folder), pause_s)
        self.gates = Gates()
        self.joining = threading.Semaphore(_JOINING)
        self.nodes: dict[str, Node] = {}
        self.environment = _environment()

    def store_of_node(self, launch: StoreAddress) -> Any:
        """Return the client that `join.Node` has of the launch's keys."""
        return store_of_node(launch)

    def start(self, numbers: range) -> None:
        """Have nodes join, each in a thread of its own."""
        for number in numbers:
            threading.Thread(target=Node(self, number).run, daemon=True).start()

    def pulses(self, which: int) -> None:
        """Give the signs of life of every *_PULSE_THREADS*-th node as often as it would, and look for the launch's end."""
        looks = 0
        while True:
            began = time.monotonic()
            for node in list(self.nodes.values()):
                if node.number // 4 % _PULSE_THREADS == which and not node.is_gone:
                    self._pulse(node, looks)
            looks += 1
            time.sleep(max(0.0, BEAT_S - (time.monotonic() - began)))

    def _pulse(self, node: Node, looks: int) -> None:
        try:
            node.joined._look_for_end()
            node.pulse(looks)
        except (RuntimeError, OSError, ValueError) as error:
            if not node.is_gone:
                node.is_gone = True
                tell({"did": "lost", "node": node.name, "error": str(error)})

    def do(self, command: Mapping[str, Any]) -> None:
        """Do what the benchmark asks."""
        match command["do"]:
            case "start":
                self.start(range(*command["numbers"]))
            case "open":
                self.gates.open(command["what"], command["generation"])
            case "kill":
                for node in list(self.nodes.values()):
                    if node.number == command["number"]:
                        node.joined._outbox.post(AgentDied(node.name, "its agent ended with code -9"))
                        node.leave()
            case "snapshot":
                for node in list(self.nodes.values()):
                    arguments = (command["name"], command["step"])
                    threading.Thread(target=node.snapshot, args=arguments, daemon=True).start()
            case "sample":
                cpu = time.process_time()
                tell({"did": "sample", "cpu": cpu, "operations": self.storage.operations})
            case other:
                raise ValueError(f"{other} is no command")


def _environment() -> dict[str, Any]:
    """Return what a worker finds: as much as one of jobs/mnist.toml."""
    files = {f"elasticflow_project/module_{number}.py": "0" * 64 for number in range(4)}
    device = {"torch": "2.13.0", "python": "3.11.7", "numpy": "2.4.6", "cpu": "AMD EPYC", "threads": "1"}
    return {
        "modules": [f"module_{number}" for number in range(20)],
        "files": files,
        "device": device,
        "step": 1,
    }


def main() -> None:
    """Do what standard input says, until it ends."""
    parent = os.getppid()
    die_with_parent(parent)
    threading.stack_size(256 * 1024)
    project, port, nodes, pause_ms = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    host = Host(project, port, nodes, pause_ms / 1000, is_served=sys.argv[5:] == [SERVED])
    for which in range(_PULSE_THREADS):
        threading.Thread(target=host.pulses, args=(which,), daemon=True).start()
    tell({"did": "ready"})
    for line in sys.stdin:
        host.do(json.loads(line))


if __name__ == "__main__":
    main()
