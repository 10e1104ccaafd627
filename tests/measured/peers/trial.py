"""One trial: a peer trains, a fault comes, and the records tell what became of it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import psutil

from tests.measured.peers.peers import SCRIPTS, Layout, Peer
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

MARK = "PEERS_NODE"
POLL_S = 0.01
START_LIMIT_S = 240.0
END_S = 5.0  # after the last step, for the other workers and for their launchers
MOST_S = 600.0


@dataclass
class Trial:
    """One run of a peer in *folder*.

    Attributes:
        peer: Who trains.
        bin: Folder of its programs.
        folder: Gets everything.
        nodes: Nodes at the start.
        most: Most nodes.
        workers: Workers on each node.
        model: Model that is trained.
        epochs: Epochs that are trained.
    """

    peer: Peer
    bin: Path
    folder: Path
    nodes: int
    most: int
    workers: int
    model: str
    epochs: int
    began: float = 0.0
    _port: int = 0
    _token: str = ""
    _launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: int = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.state.mkdir(parents=True)
        (self.folder / "records").mkdir()
        for path in SCRIPTS.iterdir():
            if path.is_file():
                shutil.copy(path, self.folder)
        self._port, self._token = free_port(), os.urandom(6).hex()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def state(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "state"

    @property
    def records(self) -> Path:
        """Folder of the records."""
        return self.folder / "records"

    def start(self) -> None:
        """Start the service, if there is one, and all nodes."""
        self.began = time.time()
        if self.peer.service is not None:
            self._start(-1, self.peer.service(self._layout(0)))
        for node in range(self.nodes):
            self.start_node(node)

    def start_node(self, node: int) -> None:
        """Start the launcher of a node."""
        self._start(node, self.peer.command(self._layout(node)))

    def _layout(self, node: int) -> Layout:
        return Layout(self.bin, node, self.most, 1, self.nodes, self.workers, self._port, self.epochs)

    def _start(self, node: int, argv: Any) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            **self.peer.variables,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PEERS_FOLDER": str(self.records),
            "PEERS_STATE": str(self.state),
            "PEERS_MODEL": self.model,
            "PEERS_EPOCHS": str(self.epochs),
            MARK: f"{self._token}-{node}",
        }
        if self.peer.each_worker_is_a_node:
            environment |= {
                "REPLICA_GROUP_ID": str(node),
                "NUM_REPLICA_GROUPS": str(self.most),
                "PEERS_RANK": str(node),
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            }
        self._started += 1
        with (self.folder / f"output-{self._started}-{node}.txt").open("wb") as output:
            self._launchers[node] = subprocess.Popen(
                argv,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """Return the living processes of a node, or of all."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mark = process.environ().get(MARK, "")
                mine = mark == f"{self._token}-{node}" if node is not None else mark.startswith(self._token)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, node: int | None = None) -> None:
        """Kill every process of a node, or of all, until none is left."""
        for _ in range(20):
            if not (alive := self.processes(node)):
                break
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        for number, launcher in self._launchers.items():
            if node is None or number == node:
                launcher.kill()  # one that has just begun has no environment to be found by
                launcher.wait()

    def terminate(self, node: int | None, grace_s: float) -> float:
        """Send SIGTERM to the launcher of a node, or to all; after *grace_s* kill what is left. Return how long it took."""
        began = time.time()
        for number, launcher in self._launchers.items():
            if number >= 0 and (node is None or number == node) and launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
        while time.time() < began + grace_s and self._alive(node):
            time.sleep(POLL_S)
        took = time.time() - began
        self.kill(node)
        return took

    def _alive(self, node: int | None) -> bool:
        return any(
            launcher.poll() is None
            for number, launcher in self._launchers.items()
            if number >= 0 and (node is None or number == node)
        )

    def newest(self) -> dict[int, tuple[int, float]]:
        """Return the newest step of each process, and when it was made."""
        found = {}
        for path in self.records.glob("steps-*.jsonl"):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 3000))
                lines = file.read().split(b"\n")
            if len(lines) > 1 and (match := lines[-2]):
                pid = int(path.stem.removeprefix("steps-"))
                found[pid] = (_number(match, b'"step": '), float(_text(match, b'"t": ')))
        return found

    def step(self) -> int:
        """Return the highest step that any process has made."""
        return max((step for step, _ in self.newest().values()), default=0)

    def workers_now(self) -> list[int]:
        """Return the living processes that made a step within the last second."""
        now = time.time()
        return sorted(pid for pid, (_, t) in self.newest().items() if now - t < 1 and psutil.pid_exists(pid))

    def wait(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Return whether *is_so* became true before the time was over, or every launcher had ended."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if is_so():
                return True
            if not self._alive(None):
                return is_so()
            time.sleep(POLL_S)
        return False

    def await_end(self, limit_s: float, last: int) -> bool:
        """Return whether all launchers ended: within *limit_s* of the last step, or `END_S` of step number *last*."""
        began, ended_at = time.time(), 0.0

        def is_over() -> bool:
            nonlocal ended_at
            newest = self.newest().values()
            if max((step for step, _ in newest), default=0) >= last:
                ended_at = ended_at or time.time()
                return time.time() > ended_at + END_S
            return time.time() > max([began, *(t for _, t in newest)]) + limit_s

        self.wait(is_over, MOST_S)
        return not self._alive(None)

    def exit_codes(self) -> list[int | None]:
        """Return how the launchers ended."""
        return [launcher.poll() for number, launcher in sorted(self._launchers.items()) if number >= 0]

    def newest_checkpoint(self) -> Path:
        """Return the largest file of the newest checkpoint."""
        every = [path for pattern in self.peer.checkpoints for path in self.state.glob(pattern)]
        newest = max(every, key=lambda path: path.stat().st_mtime)
        files = [newest] if newest.is_file() else [path for path in newest.rglob("*") if path.is_file()]
        return max(files, key=lambda path: path.stat().st_size)

    def digests(self) -> dict[str, str]:
        """Return a digest of each log."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(self.folder.glob("output-*.txt"))
        }


def _text(line: bytes, key: bytes) -> bytes:
    return line.split(key, 1)[1].split(b",", 1)[0]


def _number(line: bytes, key: bytes) -> int:
    return int(_text(line, key))


@dataclass(frozen=True)
class Plan:
    """The plan of the faults, as `plan.toml` has it."""

    seed: int
    steps: tuple[int, int]
    limit_s: float
    grace_s: float
    full_s: float
    faults: Mapping[str, Mapping[str, Any]]

    def random_of(self, fault: str, number: int) -> random.Random:
        """Return the source of what is random in a fault: the same for every peer."""
        return random.Random(f"{self.seed} {fault} {number}")


def strike(trial: Trial, fault: str, plan: Plan, number: int) -> dict[str, Any]:
    """Let training reach its step, and have the fault happen; return what is to be told of it, `fault` being its time."""
    chance = plan.random_of(fault, number)
    at = chance.randint(*plan.steps)
    if fault == "none":
        return {}
    world = trial.nodes * trial.workers

    def ready() -> bool:
        return trial.step() >= at and len(trial.workers_now()) == world

    if not trial.wait(ready, START_LIMIT_S):
        return {"note": f"step {at} was not reached with {world} workers", "never": True}
    facts = {"at_step": trial.step(), "fault": time.time()}
    return {**facts, **_ACTS[fault](trial, plan, chance)}


def _signal(number: int, trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    pid = chance.choice(trial.workers_now())
    at = time.time()
    os.kill(pid, number)
    return {"fault": at}


def _node(trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    trial.kill(trial.nodes - 1)
    return {}


def _leave(trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    return {"grace_s": round(trial.terminate(trial.nodes - 1, plan.grace_s), 2)}


def _join(trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    trial.start_node(trial.nodes)
    return {}


def _term(trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    took = round(trial.terminate(None, plan.grace_s), 2)
    trial.kill()
    facts = {"grace_s": took, "before": trial.step(), "fault": time.time()}
    trial.start()
    return facts


def _damage(fault: str, trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    trial.kill()
    path = trial.newest_checkpoint()
    damage(path, fault)
    damaged = str(path.relative_to(trial.state))
    facts = {"before": trial.step(), "damaged": damaged, "fault": time.time()}
    trial.start()
    return facts


def _full(trial: Trial, plan: Plan, chance: random.Random) -> dict[str, Any]:
    filler = trial.state / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(1 << 16))
    filled = filler.stat().st_size
    time.sleep(plan.full_s)
    filler.unlink()
    return {"filled": filled}


_ACTS: dict[str, Callable[[Trial, Plan, random.Random], dict[str, Any]]] = {
    "worker": partial(_signal, signal.SIGKILL),
    "stop": partial(_signal, signal.SIGSTOP),
    "node": _node,
    "leave": _leave,
    "join": _join,
    "term": _term,
    "half": partial(_damage, "half"),
    "bit": partial(_damage, "bit"),
    "full": _full,
}


def damage(path: Path, fault: str) -> None:
    """Cut a file to its half, or flip a bit in its middle."""
    content = bytearray(path.read_bytes())
    if fault == "half":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)
