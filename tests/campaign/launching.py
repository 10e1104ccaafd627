"""Kill workers, agents and whole nodes, let nodes join, and find the job go on each time as if nothing had happened.

By hand: `python -m tests.campaign.launching`, or a part of it with `--only`. The table lies beside this file; results
are kept as they come, so that parts may be done one by one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from elasticflow import events
from tests.campaign import tiny_job
from tests.campaign.census import (
    Holdings,
    abandoned_memory,
    agents_of,
    holdings,
    members,
    sessions,
    shared_memory,
)
from tests.campaign.disturbed import Outcome, Series
from tests.campaign.facts import head
from tests.end_to_end.harness import Running, processes_of, project_at, wait_gone
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tests.end_to_end.harness import Project

_T = TypeVar("_T")
SEED = 20261121
TABLE = Path(__file__).with_name("launching.md")
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-launching.jsonl"
STEPS, EVERY, BUDGET = 1500, 5, 10000
STORM_S = 1.0  # longest life of a worker before one is killed
CHUNK = 10  # tries in one run


@dataclass
class Try:
    """One blow and what came of it; without problems all was as it must be.

    Attributes:
        part: Of the campaign.
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
        """Strike, wait until training goes on, and look whether it went on as it must."""
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
        most = 0 if expected.reason == "resized" else 2 * EVERY
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


def strike_workers(project: Project, number: int, tries: int, expected: dict[str, Any]) -> list[Try]:
    """Kill -9 of a worker, of one node or of two, at any moment of its life."""
    draw = random.Random(f"{SEED} workers {number}")
    nodes = ("--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1") if number % 2 else ()
    course = Course(project, "workers", number, 0.01, *nodes)
    for _ in range(tries):
        rank = draw.randrange(2)
        course.progress(draw)
        kill = lambda: psutil.Process(course.series.running.pid_of(rank)).kill()  # noqa: B023, E731
        where = "two nodes" if nodes else "one node"
        course.blow(f"one of two workers on {where}", kill, Expected("crash", 1, 2))
    return course.end(expected)


def strike_agents(project: Project, number: int, tries: int, expected: dict[str, Any]) -> list[Try]:
    """Kill -9 of the agent alone; its workers die with it, and another takes over."""
    draw = random.Random(f"{SEED} agents {number}")
    course = Course(project, "agents", number, 0.01)
    for _ in range(tries):
        course.progress(draw)
        (agent,) = agents_of(course.series.running).values()
        course.blow("agent", agent.kill, Expected("agent_lost", 0, 2))
    return course.end(expected)


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


def strike_nodes(project: Project, number: int, tries: int, expected: dict[str, Any]) -> list[Try]:
    """Let a machine join, and kill all of a node, *tries* times: the one that joined or the head's own."""
    course = NodesCourse(project, number)
    for _ in range(tries):
        course.join()
        course.lose()
    return course.end(expected)


def strike_in_storm(project: Project, number: int, tries: int, expected: dict[str, Any]) -> list[Try]:
    """Kill *tries* times in one run, at any time, a worker or now and then an agent; then look for what leaked."""
    draw = random.Random(f"{SEED} storm {number}")
    course = Course(project, "storm", number, 0.025, "--set=snapshots.every=2 steps")
    done = Try("storm", f"{tries} kills")
    course.tries.append(done)
    supervisor, began = psutil.Process(course.series.running.process.pid), time.monotonic()
    at_first, of_agent = holdings(supervisor), Holdings()
    killed, newest = {"worker": 0, "agent": 0}, 0
    for count in range(tries):
        is_agent = (
            count < tries // 2 and draw.random() < 0.06
        )  # not later: its leaks are looked for at the end
        if count == tries // 2:
            course.settle(newest)
            of_agent = holdings(*agents_of(course.series.running).values())
        name = "agent" if is_agent else f"worker {draw.randrange(2)}"
        newest = course.await_workers(newest)
        time.sleep(draw.uniform(0, STORM_S))
        course.series.kill(name)
        killed[name.partition(" ")[0]] += 1
    course.settle(newest)
    done.seconds = time.monotonic() - began
    leaks = {
        "supervisor": (at_first, holdings(supervisor)),
        "agent": (of_agent, holdings(*agents_of(course.series.running).values())),
    }
    for who, (before, after) in leaks.items():
        done.what += f"; {who}: {before} before, {after} after"
        if after.is_more_than(before):
            done.problems.append(f"{who} holds more than before")
    done.what = f"{killed['worker']} workers, {killed['agent']} agents" + done.what.removeprefix(
        f"{tries} kills"
    )
    done.charged = len(course.series.named(events.BUDGET_CHARGED))
    print(done, flush=True)
    return course.end(expected)


PARTS: dict[str, tuple[Callable[..., list[Try]], int, int]] = {
    "workers": (strike_workers, 50, CHUNK),
    "agents": (strike_agents, 20, CHUNK),
    "nodes": (strike_nodes, 20, CHUNK // 2),
    "storm": (strike_in_storm, 200, 1000),
}


def count(part: str, tries: Sequence[Try]) -> int:
    """Return how many tries of *part* there are."""
    if part == "storm":
        return PARTS[part][1] * sum(done.part == part for done in tries)
    kinds = ("joins", "losses") if part == "nodes" else (part,)
    return min(sum(done.part == kind for done in tries) for kind in kinds)


TEXT = """# Launching

{date}, {facts}, {cores} cores shared with other work; commit {commit},
or an earlier one where a result was kept.
Made by `python -m tests.campaign.launching`.

An MLP with dropout in 8 virtual shards (`consistency = "exact"`), two CPU workers, {steps} steps, a snapshot every
{every}; struck by `kill -9` again and again, at most {chunk} times in a run, at moments drawn from the seed {seed},
building and restoring included. *As required*: exactly one new generation, for the reason and at the cost that README
states; no more steps done again than two snapshots are apart, and none where a node joins; every process of the run
below its command, none other with the run's mark or in one of its sessions; and at the end exit code 0, every step's
loss, done again or not, and every tensor of the last snapshot with the bits of the undisturbed run, no process, no
shared memory and no snapshot half there. *Seconds*: from the blow to the end of the next step.

| what | tries | as required | charged each | steps again, median | max | seconds, median | max |
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

* **worker**: on one node, or on two simulated ones, each with an agent.
* **agent**: the agent alone; its fork server, writer and workers die with it.
* **node**: agent, fork server, writer and worker of one of two, in any order; of a machine that had joined by `--join`
  that command, too, so that nobody is left to say so. The head's own is missed at once: its supervisor lives.
* **joins**: a machine joins by `--join`, its start included in the seconds; or the head's own node comes back.

{storm}
{problems}"""


def table(tries: list[Try]) -> str:
    """Return the Markdown table of all tries so far."""
    rows, struck = [], [done for done in tries if done.part != "storm"]
    for what in dict.fromkeys(done.what for done in struck):
        some = [done for done in struck if done.what == what]
        again, seconds = [done.redone for done in some], [done.seconds for done in some]
        cost = "/".join(sorted({str(done.charged) for done in some}))
        good = sum(not done.problems for done in some)
        rows.append(
            f"| {what} | {len(some)} | {good} | {cost} | {median(again):g} | {max(again)} "
            f"| {median(seconds):.2f} | {max(seconds):.2f} |"
        )
    storms = [
        f"**In one run**, each 0 to {STORM_S:g} s after the workers had started: {done.what}. {done.charged} restarts charged, "
        f"{done.seconds:.0f} s; {'; '.join(done.problems) or 'as required'}.\n"
        for done in tries
        if done.part == "storm"
    ]
    wrong = [f"* {done.part}, {done.what}: {'; '.join(done.problems)}" for done in struck if done.problems]
    return TEXT.format(
        **head(),
        steps=STEPS,
        every=EVERY,
        chunk=CHUNK,
        seed=SEED,
        rows="\n".join(rows),
        storm="\n".join(storms),
        problems="\n".join(["Not as required:", "", *wrong, ""] if wrong else []),
    )


def read_results(path: Path) -> list[Try]:
    """Return the tries of earlier calls."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Try(**json.loads(line)) for line in lines]


def main() -> int:
    """Strike, print one line a try, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    options.add_argument("--tries", type=int, help="of each part; writes no table")
    options.add_argument(
        "--results", type=Path, default=RESULTS, help="where results are kept: parts done are not done again"
    )
    given = options.parse_args()
    is_whole = given.tries is None
    earlier = read_results(given.results) if is_whole else []
    new: list[Try] = []
    with (
        tempfile.TemporaryDirectory(prefix="launching-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        tiny_job.write(project, STEPS, EVERY, BUDGET)
        expected = tiny_job.undisturbed(project, STEPS)
        for part in given.only:
            strike, tries, chunk = PARTS[part]
            tries = given.tries or tries
            number = count(part, earlier)  # other moments than before
            while (left := tries - count(part, [*earlier, *new])) > 0:
                found = strike(project, number, min(chunk, left), expected)
                number += 1
                new += found
                if is_whole:
                    with given.results.open("a") as file:
                        file.writelines(json.dumps(asdict(done)) + "\n" for done in found)
    tries_so_far = read_results(given.results) if is_whole else new
    text = table(tries_so_far)
    print(text)
    if is_whole:
        TABLE.write_text(text, encoding="utf-8")
    return int(any(done.problems for done in tries_so_far))


if __name__ == "__main__":
    sys.exit(main())
