"""Kill workers, agents and whole nodes, let nodes join, and find the job continue each time as if nothing had happened.

By hand: `python -m tests.measured.campaign.launching`, or a part of it with `--only`. The table lies beside this file; results
are kept as they come, so that parts may be done one by one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.census import Holdings, agents_of, holdings
from tests.end_to_end.course import SEED, Course, Expected, NodesCourse, Try
from tests.end_to_end.harness import project_at
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.end_to_end.harness import Project

TABLE = Path(__file__).with_name("launching.md")
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-launching.jsonl"
STEPS, EVERY, BUDGET = 1500, tiny_job.EVERY, 10000
STORM_S = 1.0  # longest life of a worker before one is killed
CHUNK = 10  # tries in one run


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
Made by `python -m tests.measured.campaign.launching`.

An MLP with dropout in 4 virtual shards (`consistency = "exact"`), two CPU workers, {steps} steps, a snapshot every
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
