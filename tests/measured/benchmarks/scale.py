"""What a launch of many nodes costs its supervisor and its key server: 64, 256 and 1,024 simulated nodes.

    python tests/measured/benchmarks/scale.py [--nodes 64 256 1024] [--serve] [--pause-ms 0] [--save NAME] [--plot]

The supervisor, the key server and all that is sent are real; nodes are simulated (`scale_nodes.py` says what stands for what).
For each number of nodes one launch tells the whole story: all join and a group is formed; the first step; a steady state;
a snapshot of one shard from each rank; a node is lost, and the others continue; a node is added, for which all ranks drain; the
launch is asked to leave, and ends. Each part is measured from outside of it: seconds, CPU seconds of the supervisor's main thread
and of the key server's thread, requests and bytes at the key server. CPU seconds are what to compare: the machine also runs
the nodes, so seconds say how long 1,024 nodes take on it, not on machines of their own.

`--save NAME` keeps the figures in `scale.json` under that name, `--plot` draws `elasticflow/guide/pictures/scale.svg` of what is kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# The path comes first.
from elasticflow.protocol.handshake import TOKEN
from elasticflow.run_folder import RunFolder, snapshot_name
from tests.measured.benchmarks.scale_figures import KEPT, Phase, exponents, keep, kept, table
from tests.measured.benchmarks.scale_picture import drawing
from tests.measured.benchmarks.scale_supervisor import JOB, RUN_ID, SERVED
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PICTURE = Path(__file__).resolve().parents[3] / "elasticflow" / "guide" / "pictures" / "scale.svg"
SIZES = (64, 256, 1024)
NOW, BEFORE = "now", "before"
"""Names under which the figures of the picture are kept."""
_HOSTS = 4
_STEADY_S = 5.0
_LIMIT_S = 120.0


class Child:
    """A process that tells what happens by lines of JSON, and takes lines on its standard input."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self._name = " ".join(arguments)
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parents[3],
        )
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in _pipe(self.process.stdout):
            self.said.put(json.loads(line))

    def tell(self, **command: Any) -> None:
        """Send it a line."""
        pipe = _pipe(self.process.stdin)
        pipe.write(json.dumps(command) + "\n")
        pipe.flush()

    def hear(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the next line of which *is_it* is true; others before it are forgotten."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            try:
                line = self.said.get(timeout=1.0)
            except queue.Empty:
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self._name} ended with {self.process.returncode}") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self._name} does not answer") from None
                continue
            if is_it(line):
                return line

    def end(self) -> None:
        """Kill it, if it lives."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        with suppress(BrokenPipeError):
            _pipe(self.process.stdin).close()
        _pipe(self.process.stdout).close()


class Story:
    """One launch of *nodes* nodes, from the first that joins to its end."""

    def __init__(
        self, nodes: int, folder: Path, phases: list[Phase], pause_ms: int, *, is_served: bool
    ) -> None:
        self.nodes, self.phases = nodes, phases
        self._ends = ExitStack()
        (folder / "pieces.py").write_text("class Net: ...\n\n\ndef digits(): ...\n")
        (folder / "job.toml").write_text("# as scale_supervisor.job_of says\n")
        environment = {**os.environ, TOKEN: secrets.token_hex(32)}
        port = free_port()
        self.server: Child | None = None
        if is_served:
            self.server = self._child(
                "tests.measured.benchmarks.scale_supervisor", "--serve", str(port), environment=environment
            )
            self.server.hear(lambda line: line.get("event") == "serving")
        leads = [str(folder), str(nodes), str(port), *([SERVED] if is_served else [])]
        self.supervisor = self._child(
            "tests.measured.benchmarks.scale_supervisor", *leads, environment=environment
        )
        self.supervisor.hear(lambda line: line.get("event") == "run.started")
        count = min(_HOSTS, nodes)
        takes = [str(folder), str(port), str(nodes), str(pause_ms), *([SERVED] if is_served else [])]
        self.hosts = [
            self._child("tests.measured.benchmarks.scale_nodes", *takes, environment=environment)
            for _ in range(count)
        ]
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        for host in self.hosts:
            host.said = self._heard
        for _ in self.hosts:
            self._await(1, lambda line: line["did"] == "ready")

    def _child(self, *arguments: str, environment: dict[str, str]) -> Child:
        child = Child(*arguments, environment=environment)
        self._ends.callback(child.end)
        return child

    def close(self) -> None:
        """End all processes."""
        self._ends.close()

    def tell(self, steady_s: float = _STEADY_S) -> None:
        """Have everything happen."""
        numbers = [range(first, self.nodes, len(self.hosts)) for first in range(len(self.hosts))]
        with self._phase("all join, a group is formed"):
            for host, own in zip(self.hosts, numbers, strict=True):
                host.tell(do="start", numbers=[own.start, own.stop, own.step])
            self._await(self.nodes, lambda line: line["did"] == "formed")
        with self._phase("first step"):
            self._train(1, self.nodes)
        with self._phase(f"steady state, {steady_s:g} s"):
            time.sleep(steady_s)
        with self._phase("snapshot") as phase:
            name = snapshot_name(10, 1, secrets.token_hex(4))
            before = self._operations()
            self._tell_hosts(do="snapshot", name=name, step=10)
            self._await(self.nodes, lambda line: line["did"] in {"snapshot.committed", "snapshot.failed"})
            self.supervisor.hear(lambda line: line.get("event") == "snapshot.committed")
            phase.operations = self._operations() - before
        with self._phase("a node is lost, others train"):
            self._tell_hosts(do="kill", number=self.nodes - 1)
            self._await(self.nodes - 1, lambda line: line["did"] == "formed")
            self._train(2, self.nodes - 1)
        with self._phase("a node is added, all drain, train"):
            self.hosts[0].tell(do="start", numbers=[self.nodes, self.nodes + 1, 1])
            self._await(self.nodes, lambda line: line["did"] == "formed")
            self._train(3, self.nodes)
        with self._phase("asked to leave, to the end", is_last=True):
            self.supervisor.process.send_signal(signal.SIGTERM)
            self._await(self.nodes, lambda line: line["did"] == "left")

    def _train(self, generation: int, nodes: int) -> None:
        self._tell_hosts(do="open", what="start", generation=generation)
        self._await(nodes, lambda line: line["did"] == "started")
        self._tell_hosts(do="open", what="train", generation=generation)
        self.supervisor.hear(lambda line: line.get("event") == "training.first_step")

    def _tell_hosts(self, **command: Any) -> None:
        for host in self.hosts:
            host.tell(**command)

    def _await(self, count: int, is_it: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return *count* lines of the hosts of which *is_it* is true, once they are there."""
        heard: list[dict[str, Any]] = []
        deadline = time.monotonic() + _LIMIT_S
        while len(heard) < count:
            try:
                line = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{len(heard)} of {count} nodes came so far in {_LIMIT_S:g} s") from None
            if line["did"] in {"failed", "lost"}:
                raise RuntimeError(f"{line['node']}: {line['error']}")
            if is_it(line):
                heard.append(line)
        return heard

    def _operations(self) -> int:
        self._tell_hosts(do="sample")
        return sum(
            line["operations"] for line in self._await(len(self.hosts), lambda line: line["did"] == "sample")
        )

    def _sample(self, *, is_last: bool = False) -> dict[str, Any]:
        if not is_last:
            self.supervisor.tell()
        sample: dict[str, Any] = self.supervisor.hear(
            lambda line: "sample" in line and ("code" in line) == is_last
        )["sample"]
        if self.server is not None:
            self.server.tell()
            own = self.server.hear(lambda line: "sample" in line)["sample"]
            names = ("keys", "requests", "sent", "received", "connections", "descriptors")
            sample |= {name: own[name] for name in names}
        return sample

    @contextmanager
    def _phase(self, title: str, *, is_last: bool = False) -> Iterator[Phase]:
        before, hosts_before = self._sample(), self._hosts_cpu_s()
        phase = Phase(title, self.nodes)
        yield phase
        after = self._sample(is_last=is_last)
        phase.take(before, after, self._hosts_cpu_s() - hosts_before)
        self.phases.append(phase)
        print(f"{self.nodes:5d}  {phase}", flush=True)

    def _hosts_cpu_s(self) -> float:
        return sum(sum(psutil.Process(host.process.pid).cpu_times()[:2]) for host in self.hosts)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def measure(
    nodes: int,
    phases: list[Phase],
    pause_ms: int = 0,
    *,
    is_served: bool = False,
    steady_s: float = _STEADY_S,
) -> None:
    """Add to *phases* what each part of a launch of *nodes* nodes has cost; where one fails, those before it.

    Raises:
        RuntimeError: a node or the supervisor failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        story = Story(nodes, Path(folder), phases, pause_ms, is_served=is_served)
        try:
            story.tell(steady_s)
            phases[-1].journal_bytes = RunFolder.of(Path(folder), JOB, RUN_ID).events.stat().st_size
        finally:
            story.close()


def main() -> None:
    """Measure, print, keep, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--serve", action="store_true", help="the keys are served by a process of their own")
    parser.add_argument("--pause-ms", type=int, default=0, help="of the snapshots' store, before each answer")
    parser.add_argument("--save", metavar="NAME", help=f"keep the figures in {KEPT.name} under this name")
    parser.add_argument("--plot", action="store_true", help=f"draw {PICTURE.name} of what is kept")
    options = parser.parse_args()
    all_phases = []
    for nodes in options.nodes:
        phases: list[Phase] = []
        try:
            measure(nodes, phases, options.pause_ms, is_served=options.serve)
        except RuntimeError as error:
            print(f"{nodes:5d}  ends there: {error}", flush=True)
        all_phases += phases
        if options.save:
            keep(options.save, phases)
    print(table(all_phases))
    for line in exponents(all_phases):
        print(line)
    if options.plot:
        figures = kept()
        PICTURE.write_text(drawing(figures[NOW], figures.get(BEFORE, ())), encoding="utf-8")


if __name__ == "__main__":
    main()
