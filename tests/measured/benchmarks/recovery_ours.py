"""Tries of the recovery benchmark with elasticflow: real launches, timed by their own events and step lines."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from tests.end_to_end.harness import named, read_lines
from tests.measured.benchmarks.recovery_figures import MARKS, WARM_STEPS, Try

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.harness import Project, Running

JOB = "recovery"
_TEXT = """
[job]
name = "{name}"
seed = 1234
[model]
entry = "{model}:Net"
args = {{ width = 32 }}
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
args = {{ lr = 3e-3 }}
clip_grad_norm = 1.0
[dataset]
entry = "examples.mnist:digits"
args = {{ split = "train" }}
global_batch_size = 64
[train]
steps = {steps}
threads = 1
{train}
[nodes]
max = {nodes}
nproc_per_node = {workers}
[restarts]
budget = 1000
warm = "{warm}"
[snapshots]
every = "20 steps"
"""


def job_text(
    model: str, workers: int, nodes: int = 1, *, train: str = "", warm: str = "auto", steps: int = 1_000_000
) -> str:
    """Return the job file: *model* is the module that has Net, *train* more lines of its table [train]."""
    return _TEXT.format(
        name=JOB, model=model, workers=workers, nodes=nodes, train=train, warm=warm, steps=steps
    )


class Ours:
    """Tries in *project*, each kind in one launch; *model* is the module that has Net, *train* more of [train]."""

    def __init__(self, project: Project, model: str, train: str = "") -> None:
        self._project, self._model, self._train = project, model, train

    def start(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Start two workers on one node; time from the command to the first step."""
        for _ in range(tries):
            began = time.time()
            with self._launch(2, nodes=1) as running:
                first = running.wait_for("a step", partial(first_step, running, 0))
                yield "start", Try(round(first - began, 4), marks=_marks(running, began))

    def worker(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Kill a worker of two on one node; time to the first step of the next generation."""
        for made in self._kill_one_of(2, tries):
            yield "worker", made

    def gpu(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Kill the only worker, which has a GPU; time to the first step of the next generation."""
        for made in self._kill_one_of(1, tries):
            yield "gpu", made

    def _kill_one_of(self, workers: int, tries: int) -> Iterator[Try]:
        with self._launch(workers) as running:
            for number in range(tries):
                generation = _trains(running, workers)
                _wait_for_standbys(running, generation)
                killed = time.time()
                os.kill(running.pid_of(number % workers), signal.SIGKILL)
                yield _until_first_step(running, generation, killed)

    def nodes(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Have a second node join, then kill all of it at once, so that nobody tells: it has vanished."""
        with self._launch(1) as running:
            for _ in range(tries):
                generation = _trains(running, 1)
                joined = self._join(running)
                first = running.wait_for("a group of two", partial(first_step, running, generation))
                before = [r["time"] for r in read_lines(running.run.metrics) if r["generation"] == generation]
                yield "join", Try(round(first - before[-1], 4), marks=_marks(running, before[-1]))
                generation = _trains(running, 2)
                lost = psutil.Process(joined.process.pid)
                below = lost.children(recursive=True)
                killed = time.time()
                for process in (lost, *below):
                    process.kill()
                yield "node", _until_first_step(running, generation, killed)

    def agent(self, tries: int) -> Iterator[tuple[str, Try]]:
        """Kill the second node's agent; what started it lives, tells, and starts it again."""
        with self._launch(1) as running:
            _trains(running, 1)
            machine = psutil.Process(self._join(running).process.pid)
            for _ in range(tries):
                generation = _trains(running, 2)
                killed = time.time()
                machine.children()[0].kill()
                yield "agent", _until_first_step(running, generation, killed)

    @contextmanager
    def _launch(self, workers: int, nodes: int = 2) -> Iterator[Running]:
        self._project.write("jobs/recovery.toml", job_text(self._model, workers, nodes, train=self._train))
        running = self._project.run("jobs/recovery.toml", secrets.token_hex(4), job=JOB)
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait()

    def _join(self, running: Running) -> Running:
        started = running.wait_for("an endpoint", lambda: named(running.events(), events.RUN_STARTED))
        arguments = ("run", "jobs/recovery.toml", f"--join={started[0]['endpoint']}")
        return self._project.start(*arguments, run_id=running.run.run_id, job=JOB)


def _trains(running: Running, world_size: int) -> int:
    """Return the number of the generation of that size that runs, once it is past all steps done before."""
    generation = running.wait_for_group(world_size, 0)
    running.wait_for_step(int(running.state()["step"]) + WARM_STEPS, generation - 1)
    return generation


def _wait_for_standbys(running: Running, generation: int) -> None:
    """Wait until the workers have standbys, where there are some: who fails sooner pays for the imports, or the trace."""
    started = named(running.events(), events.TRAINING_STARTED)[0]
    reasons = (
        *named(running.events(), events.PRELOAD_REFUSED),
        *named(running.events(), events.TRAINING_COMPILED),
    )
    if started["device"] != "cpu" or reasons:

        def ready() -> list[dict[str, Any]]:
            return [
                e for e in named(running.events(), events.STANDBYS_READY) if e["generation"] == generation
            ]

        running.wait_for("standbys", ready)


def _until_first_step(running: Running, generation: int, killed: float) -> Try:
    first = running.wait_for("a step", partial(first_step, running, generation))
    return Try(round(first - killed, 4), marks=_marks(running, killed))


def first_step(running: Running, generation: int) -> float | None:
    """Return when the generation after *generation* finished its first step."""
    for event in named(running.events(), events.TRAINING_FIRST_STEP):
        if event["generation"] > generation:
            return _unix(event)
    return None


def _marks(running: Running, began: float) -> dict[str, float]:
    """Return when each of `MARKS` happened first after *began*, in seconds from there."""
    found: dict[str, float] = {}
    for event in running.events():
        if event["event"] in MARKS and (at := _unix(event) - began) > 0:
            found.setdefault(event["event"], round(at, 4))
    return found


def _unix(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()
