"""One run of the tiny job that is struck again and again, and judged after each blow."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.census import abandoned_memory, agents_of, members, sessions, shared_memory
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import Running, processes_of, wait_gone
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tests.end_to_end.harness import Project

_T = TypeVar("_T")
SEED = 20261121


@dataclass
class Try:
    """One blow and what came of it; without problems all was as it must be.

    Attributes:
        part: Of the campaign, or the name of the run.
        what: Was done.
        step: Last step before it.
        redone: Steps done again.
        seconds: Until the next step was finished.
        charged: Restarts it cost.
        problems: In words.
    """

    part: str
    what: str
    step: int = 0
    redone: int = 0
    seconds: float = 0.0
    charged: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What a blow must lead to: the next generation's reason, the last one's class, its cost and its size."""

    reason: str
    charged: int
    world_size: int


class Course:
    """One run that is struck again and again."""

    def __init__(
        self,
        project: Project,
        part: str,
        number: int,
        pause_s: float,
        *options: str,
        at_start: Callable[[Series], object] = lambda _: None,
    ) -> None:
        self.part, self.run_id = part, f"{part}-{number}"
        self.project = project
        tiny_job.reset(project)
        self.memory = shared_memory()
        self.series = Series(project, self.run_id, job="tiny", options=options, TINY_PAUSE_S=str(pause_s))
        at_start(self.series)
        self.generation = self.series.trains(0)
        self.tries: list[Try] = []
        self.sessions = sessions(self.series.running)

    def progress(self, draw: random.Random) -> None:
        """Wait until a step was finished that none was before, except now and then: that costs back-off; then a little."""
        if self.tries and draw.random() < 0.8:
            self.series.reach(max(done.step for done in self.tries) + 1)
        time.sleep(draw.uniform(0, 0.6))

    def await_workers(self, after: int) -> int:
        """Return the number of the generation after *after* whose workers have started."""

        def started() -> int | None:
            state = self.series.running.state()
            return state["generation"] if state["generation"] > after and state["workers"] else None

        return int(self.series.wait("workers", started))

    def settle(self, after: int) -> None:
        """Return once a generation after the one that was struck last has finished a step."""
        self.generation = self.series.trains(after)

    def blow(self, what: str, strike: Callable[[], object], expected: Expected) -> Try:
        """Strike, wait until training continues, and look whether it continued as it must."""
        done = Try(self.part, what, step=self.series.step())
        self.tries.append(done)
        before, began = self.generation, time.monotonic()
        strike()
        self.generation = self.series.trains(before)
        done.seconds = time.monotonic() - began
        self._judge(done, before, expected)
        self.sessions |= sessions(self.series.running)
        print(done, flush=True)
        return done

    def _judge(self, done: Try, before: int, expected: Expected) -> None:
        started = self.series.named(events.GENERATION_STARTED, before)
        found = [(e["generation"], e["reason"], e["world_size"]) for e in started]
        if found != [(before + 1, expected.reason, expected.world_size)]:
            done.problems.append(f"generations {found}")
        charged = [e for e in self.series.named(events.BUDGET_CHARGED) if e["generation"] >= before]
        done.charged = len(charged)
        if done.charged != expected.charged:
            done.problems.append(f"charged {done.charged}, not {expected.charged}")
        (ended, *_) = [e for e in self.series.named(events.GENERATION_ENDED) if e["generation"] == before]
        went_on = self.series.started(before)
        done.redone = ended["step"] - went_on["step"]
        most = 0 if expected.reason == "resized" else 2 * tiny_job.EVERY
        if not 0 <= done.redone <= most:
            done.problems.append(f"{done.redone} steps done again")
        self._look_for_orphans(done, expected.world_size)

    def _look_for_orphans(self, done: Try, world_size: int) -> None:
        """Every process of the run hangs below a command, and there are as many workers as there should be."""
        roots = [r.process.pid for r in self.commands()]
        if left := _lasting(lambda: [p for p in processes_of(self.run_id) if not _is_below(p, roots)]):
            done.problems.append(f"orphans {left}")
        workers = self.series.running.state()["workers"]
        if len(workers) != world_size:
            done.problems.append(f"{len(workers)} workers")

    def commands(self) -> list[Running]:
        """Return the commands of the run that live."""
        return [self.series.running]

    def end(self, expected: dict[str, Any]) -> list[Try]:
        """Let the run come to its end, compare it with *expected*, and return the tries."""
        tiny_job.hurry(self.project)
        outcome = Outcome("", "")
        self.series.finish(expected, outcome)
        generations = [e["generation"] for e in self.series.named(events.GENERATION_STARTED)]
        if generations != list(range(1, self.generation + 1)):
            outcome.problems.append(f"generations {generations[-3:]} after {self.generation}")
        outcome.problems += self._left_behind()
        print(self.run_id, outcome.problems or "as undisturbed", flush=True)
        for done in self.tries:
            done.problems += outcome.problems
        return self.tries

    def _left_behind(self) -> list[str]:
        found = []
        if left := wait_gone(self.run_id):
            found.append(f"processes left: {left}")
        if same := _lasting(lambda: members(self.sessions)):
            found.append(f"processes left in sessions of the run: {same}")
        if held := _lasting(lambda: abandoned_memory() - self.memory):
            found.append(f"left in shared memory: {sorted(held)}")
        return found


def _lasting(look: Callable[[], Collection[_T]], limit_s: float = 10.0) -> Collection[_T]:
    """Return what is still there when *limit_s* is over; nothing as soon as there is nothing."""
    deadline = time.monotonic() + limit_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _is_below(process: psutil.Process, roots: Sequence[int]) -> bool:
    try:
        return process.pid in roots or any(parent.pid in roots for parent in process.parents())
    except psutil.NoSuchProcess:
        return True


class NodesCourse(Course):
    """A run of two machines with one worker each: the head's, and one that joins and is lost, again and again."""

    def __init__(self, project: Project, number: int, pause_s: float = 0.02) -> None:
        self._draw = random.Random(f"{SEED} nodes {number}")
        endpoint = f"127.0.0.1:{free_port()}"
        self._options = (
            f"--set=nodes.endpoint={endpoint}",
            "--set=nodes.max=2",
            "--set=nodes.nproc_per_node=1",
        )
        self._joined: Running | None = None
        super().__init__(project, "nodes", number, pause_s, *self._options)
        self._join = ("run", "jobs/tiny.toml", f"--join={endpoint}", *self._options)

    def commands(self) -> list[Running]:
        """Return the commands of the run that live."""
        return [self.series.running, *([self._joined] if self._joined else [])]

    def join(self) -> None:
        """Have a machine join, unless one has."""
        if self._joined is None:
            self.part = "joins"
            self.blow("a machine joins", self._start, Expected("resized", 0, 2))

    def lose(self) -> None:
        """Lose one of the two machines; if it was the head's own, have it come back."""
        self.progress(self._draw)
        self.part = "losses"
        agents = agents_of(self.series.running)
        rank_of = {w["node"]: w["rank"] for w in self.series.running.state()["workers"]}
        node = self._draw.choice(sorted(agents))
        role = f"node of rank {rank_of[node]}, " + ("the head's own" if node == "n0" else "which had joined")
        victims = [agents[node], *agents[node].children(recursive=True)]
        if node == "n0":  # its supervisor lives and starts an agent again
            self.blow(role, lambda: self._kill(victims), Expected("agent_lost", 0, 1))
            self.part = "joins"
            self.blow("the head's own node comes back", lambda: None, Expected("resized", 0, 2))
        else:
            assert self._joined is not None
            victims.append(psutil.Process(self._joined.process.pid))
            self.blow(role, lambda: self._kill(victims), Expected("node_lost", 1, 1))
            self._joined.process.wait()
            self._joined = None

    def _start(self) -> None:
        self._joined = self.project.start(*self._join, run_id=self.run_id, job="tiny")

    def _kill(self, victims: list[psutil.Process]) -> None:
        self._draw.shuffle(victims)
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    def end(self, expected: dict[str, Any]) -> list[Try]:
        """See that a machine that joined ends with the run, too."""
        tries = super().end(expected)
        if self._joined is not None and (code := self._joined.end()) != 0:
            tries[-1].problems.append(f"the machine that joined ended with code {code}")
        return tries
