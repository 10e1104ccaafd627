"""A run that is disturbed again and again while it saves and loads, and what came of each fault."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from elasticflow.protocol import worker_environment
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.harness import LIMIT_S, Project, Running, bytes_of_tensors, read_lines, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULES = {"writer": "elasticflow.snapshots.writer.main", "agent": "elasticflow.launcher.agent.main"}


@dataclass
class Outcome:
    """What came of one fault; without problems all was as it must be.

    Attributes:
        victim: What was killed, or the signal that was sent.
        point: Where in the code.
        lost: Steps done again.
        seconds: Until training continued.
        is_wrongly_loaded: A snapshot was loaded that is not what was written.
        problems: In words.
    """

    victim: str
    point: str
    lost: int = 0
    seconds: float = 0.0
    is_wrongly_loaded: bool = False
    problems: list[str] = field(default_factory=list)


class Series:
    """One run of *job* that is disturbed again and again, and must end as if nobody had."""

    def __init__(
        self,
        project: Project,
        run_id: str,
        *sets: str,
        job: str = "mnist",
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self._project, self._id, self._job, self._environment = project, run_id, job, environment
        self._given = (
            f"jobs/{job}.toml",
            f"--run-id={run_id}",
            *options,
            *(f"--set={text}" for text in sets),
        )
        self.running: Running = project.start("run", *self._given, run_id=run_id, job=job, **environment)
        self.catalog = Catalog(Storage(str(self.running.run.path)))
        self.happened: list[dict[str, Any]] = []
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        path = self.running.run.events
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            self.happened += [json.loads(line) for line in whole.splitlines()]
        return self.happened

    def named(self, name: str, after: int = 0) -> list[dict[str, Any]]:
        """Return events of that name, of generations after *after*."""
        return [e for e in self.look() if e["event"] == name and e["generation"] > after]

    def wait(self, what: str, is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Return the first true value."""
        return self.running.wait_for(what, is_so, limit_s)

    def settle(self, after: int) -> int:
        """Return the number of a generation after *after* that trains and has committed a snapshot of its own."""
        committed = self.wait("a snapshot", lambda: self.named(events.SNAPSHOT_COMMITTED, after))
        return int(committed[-1]["generation"])

    def process(self, name: str) -> psutil.Process | None:
        """Return that living process of the run, or None while there is none."""
        with suppress(psutil.Error):  # it ends while it is looked at
            if name.startswith("worker"):
                rank = int(name.removeprefix("worker "))
                pids = [w["pid"] for w in self.running.state().get("workers", []) if w["rank"] == rank]
            else:
                pids = [p.pid for p in self.running.tree() if MODULES[name] in p.cmdline()]
            found = psutil.Process(pids[0]) if pids else None
            return found if found is not None and found.status() != psutil.STATUS_ZOMBIE else None
        return None

    def kill(self, victim: str) -> None:
        """Kill -9; after `everything` it is for the caller to `resume`."""
        if victim != "everything":
            process: psutil.Process = self.wait(victim, lambda: self.process(victim))
            process.kill()
            return
        for process in [psutil.Process(self.running.process.pid), *self.running.tree()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.running.process.wait()
        assert [] == wait_gone(self._id)

    def resume(self, *options: str) -> None:
        """Continue with the run in a new launch."""
        self.running = self._project.start(
            "resume", self._id, *options, run_id=self._id, job=self._job, **self._environment
        )

    def again(self, **environment: str) -> None:
        """Give the same command again, with *environment* beside what it had."""
        self._environment = {**self._environment, **environment}
        self.running = self._project.start(
            "run", *self._given, run_id=self._id, job=self._job, **self._environment
        )

    def trains(self, after: int) -> int:
        """Return the number of a generation after *after* that has finished a step."""
        first = self.wait("a first step", lambda: self.named(events.TRAINING_FIRST_STEP, after))
        return int(first[-1]["generation"])

    def started(self, after: int) -> dict[str, Any]:
        """Return how the next generation started training."""
        found = self.wait("training", lambda: self.named(events.TRAINING_STARTED, after))
        return dict(found[0])

    def restored(self, after: int, outcome: Outcome, committed: int) -> int:
        """Note what the next generation was restored from, every byte of it looked at; return its step."""
        started = self.started(after)
        name = started["restored_from"]
        if started["step"] < committed:
            outcome.problems.append(f"resumed from step {started['step']}, {committed} was committed")
        if name is not None and name != "memory" and (damage := self._damage(name)):
            outcome.problems.append(f"loaded {name}: {damage}")
            outcome.is_wrongly_loaded = True
        return int(started["step"])

    def _damage(self, name: str) -> list[str]:
        try:
            return verify.verify(self.catalog, self.catalog.manifest(name))
        except FileNotFoundError:
            return []  # a later generation's retention was faster than this look; the bits at the end tell

    def step(self) -> int:
        """Return the last finished step, from the ranks' heartbeats: log lines of quick steps are written later."""
        agent: psutil.Process = self.wait("agent", lambda: self.process("agent"))
        for descriptor in Path(f"/proc/{agent.pid}/fd").iterdir():
            if "elasticflow-heartbeats" in os.readlink(descriptor):  # noqa: PTH115
                slots = descriptor.read_bytes()
                beats = range(0, len(slots), worker_environment.HEARTBEAT_SLOT)
                return max(int(worker_environment.HEARTBEAT.unpack_from(slots, at)[1]) for at in beats)
        return 0

    def reach(self, step: int) -> None:
        """Return once that step is finished."""
        self.wait(f"step {step}", lambda: self.step() >= step)

    def finish(self, expected: dict[str, Any] | None, outcome: Outcome) -> dict[str, Any]:
        """Return losses and tensors of the run once it has ended; note in *outcome* what is not as in *expected*."""
        if (code := self.running.end(600)) != 0:
            outcome.problems.append(f"exit code {code}: {self.running.told()[-600:]}")
        run, newest = self.running.run, self.catalog.newest()
        assert newest is not None
        losses = {r["step"]: r["loss"] for r in read_lines(run.metrics) if "loss" in r}
        again = [r for r in read_lines(run.metrics_redone) if "loss" in r]
        found = {"losses": losses, "bits": bytes_of_tensors(self.catalog, newest)}
        if expected is not None:
            wrong = sum(expected["losses"].get(r["step"]) != r["loss"] for r in again)
            differ = [what for what in found if found[what] != expected[what]]
            outcome.is_wrongly_loaded |= bool(wrong or differ)
            outcome.problems += [f"{wrong} steps done again had another loss"] if wrong else []
            outcome.problems += [f"other {what} than undisturbed" for what in differ]
        left = set(self.catalog.storage.list(self.catalog.folder())) - {
            m.name for m in self.catalog.committed()
        }
        outcome.problems += [f"left behind: {name}" for name in left]
        rejected = self.named(events.SNAPSHOT_REJECTED)
        outcome.problems += [f"{event['name']} was rejected: {event['reason']}" for event in rejected]
        return found
