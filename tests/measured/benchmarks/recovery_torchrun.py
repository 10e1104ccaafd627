"""Tries of the recovery benchmark with torchrun as it comes, and a script written by hand (`recovery_script.py`)."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

from tests.end_to_end.harness import read_lines
from tests.measured.benchmarks.recovery_figures import WARM_STEPS, Try
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

SCRIPT = Path(__file__).with_name("recovery_script.py")
MAX_RESTARTS = 3  # what torchrun's documentation shows
START_LIMIT_S = 90.0  # a node that waits for others, which may come, waits for 30 s
T = TypeVar("T")
_MARK = "ELASTICFLOW_BENCHMARK"
_POLL_S = 0.02


class Rival:
    """Tries in *folder*, where the packages that the script imports lie, each a job of its own; *limit_s* to continue."""

    def __init__(self, folder: Path, model: str, limit_s: float) -> None:
        self._folder, self._model, self._limit_s = folder, model, limit_s

    def start(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Start two workers on one node; time from the command to the first step."""
        for _ in range(tries):
            with self.job() as job:
                began = time.time()
                job.start("--standalone", "--nproc-per-node=2")
                yield "start", self._next_first_step(job, [], began)

    def worker(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Kill a worker of two on one node; time to the next worker group's first step."""
        for number in range(tries):
            with self.job() as job:
                job.start("--standalone", "--nproc-per-node=2")
                pids = job.train(2)
                killed = time.time()
                psutil.Process(pids[number % 2]).kill()
                yield "worker", self._next_first_step(job, pids, killed)

    def job(self) -> Job:
        """Return a job, not yet started."""
        return Job(self._folder, self._model)

    def _next_first_step(self, job: Job, before: list[int], began: float) -> Try:
        """Return when rank 0 of another group than that of *before* finished a step, in seconds after *began*."""

        def stepped() -> float | None:
            return next(
                (x["time"] for x in job.steps() if x["time"] > began and x["pid"] not in before), None
            )

        at = job.wait(stepped, self._limit_s)
        groups = [x for x in job.lines() if x["step"] is None and x["rank"] == 0 and x["time"] > began]
        outcome = f"{len(groups) or 'no'} group{'s' * (len(groups) > 1)} formed"
        if at is not None:
            return Try(round(at - began, 4), "" if len(groups) == 1 else outcome)
        ended = ", it gave up" if job.has_ended else ""
        return Try(None, f"not within {self._limit_s:g} s: {outcome}{ended}")


class Torchrun(Rival):
    """Tries with torchrun."""

    def nodes(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Kill all of the node of two that does not serve the rendezvous; in another job, have a second node join."""
        for _ in range(tries):
            with self.job() as job:
                job.start_node(0)
                second = job.start_node(1)
                pids = job.train(2)
                lost = psutil.Process(second.pid)
                below = lost.children(recursive=True)
                killed = time.time()
                for process in (lost, *below):
                    process.kill()
                yield "node", self._next_first_step(job, pids, killed)
            with self.job() as job:
                job.start_node(0)
                pids = job.train(1)
                asked = time.time()
                job.start_node(1)
                found = self._next_first_step(job, pids, asked)
                if found.seconds is not None:
                    last = max(line["time"] for line in job.steps() if line["pid"] in pids)
                    found = Try(round(asked + found.seconds - last, 4), found.outcome)
                yield "join", found


class Job:
    """One job in a folder of its own, torchrun's; nothing of it is left afterwards."""

    def __init__(self, project: Path, model: str) -> None:
        self._mark = secrets.token_hex(8)
        self._project, self._model = project, model
        self._folder = project / f"torchrun-{self._mark}"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._port = free_port()

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._alive():  # not only the agents: those that are killed leave their workers behind
            with suppress(psutil.Error):
                process.kill()
        for agent in self._agents:
            agent.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, options: tuple[str, ...]) -> list[str]:
        """Return what starts an agent with the script."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        return [*torchrun, f"--max-restarts={MAX_RESTARTS}", str(SCRIPT)]

    def start_node(self, number: int) -> subprocess.Popen[bytes]:
        """Start the agent of a node of one worker; node 0 serves the rendezvous."""
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=recovery")
        host = f"--rdzv-conf=is_host={int(number == 0)}"
        return self.start("--nnodes=1:2", "--nproc-per-node=1", *rendezvous, host)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent, in a process group of its own."""
        argv = [*self.command(options), self._model, str(self._folder)]
        with (self._folder / f"output-{len(self._agents)}.txt").open("wb") as output:
            agent = subprocess.Popen(
                argv,
                cwd=self._project,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1", _MARK: self._mark},
            )
        self._agents.append(agent)
        return agent

    def train(self, world_size: int) -> list[int]:
        """Return the processes of the workers, by rank, once they train at full speed."""

        def trained() -> list[int] | None:
            steps = [x for x in self.steps() if x["world_size"] == world_size]
            if len(steps) <= WARM_STEPS:
                return None
            started = [x for x in self.lines() if x["step"] is None and x["world_size"] == world_size]
            newest = {x["rank"]: x["pid"] for x in started}
            return [newest[rank] for rank in range(world_size)]

        found = self.wait(trained, START_LIMIT_S)
        if found is None:
            texts = [path.read_text()[-2000:] for path in sorted(self._folder.glob("output-*.txt"))]
            raise RuntimeError(
                f"torchrun did not begin to train within {START_LIMIT_S:g} s:\n" + "\n".join(texts)
            )
        return found

    def wait(self, find: Callable[[], T | None], limit_s: float) -> T | None:
        """Return what *find* finds, or None if that is nothing until the time is over or all agents have ended."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if found := find():
                return found
            if self.has_ended:
                return find()
            time.sleep(_POLL_S)
        return None

    @property
    def has_ended(self) -> bool:
        """Whether every agent has ended."""
        return all(agent.poll() is not None for agent in self._agents)

    def lines(self) -> list[dict[str, Any]]:
        """Return what the workers have written."""
        return read_lines(self._folder / "lines.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of finished steps."""
        return [line for line in self.lines() if line["step"] is not None]

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found


def _path() -> str:
    """Return PYTHONPATH with this repository, for scripts that import from it."""
    return os.pathsep.join(filter(None, (str(SCRIPT.parents[3]), os.environ.get("PYTHONPATH"))))
