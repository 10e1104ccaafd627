"""Kill workers, supervisors and agents over separate runs of the main job, and write down what came of it.

By hand, about six minutes: `python -m tests.measured.campaign.kills`. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from tests.end_to_end.harness import ROOT, Project, Running, named, read_lines, steps_of, wait_gone
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261120
TABLE = Path(__file__).with_name("kills.md")
STEPS, STEPS_PER_EPOCH = 225, 22.5  # jobs/mnist.toml: 1,440 samples, batches of 64, 10 epochs
SNAPSHOT_EVERY = 20
LIMIT_S = 60


@dataclass(frozen=True)
class Kill:
    """One blow: `worker 0`, `worker 1`, `supervisor` or `agent`, and when it falls.

    Attributes:
        number: Of the run, from 1.
        victim: What is killed.
        moment: `start`, `step`, `snapshot` or `evaluation`.
        at: Seconds after the group started, or the step it waits for.
    """

    number: int
    victim: str
    moment: str
    at: float

    def planned(self) -> str:
        """Return the moment in words."""
        if self.moment == "start":
            return f"{self.at:.2f} s after the group started"
        prefix = "" if self.moment == "step" else f"{self.moment} after "
        return f"{prefix}step {self.at:.0f}"


@dataclass(frozen=True)
class Outcome:
    """What came of one kill; `problems` is empty if all was as it must be, `load` the machine's load average."""

    kill: Kill
    step: int
    redone: int
    seconds: float
    restarts: int
    status: str
    problems: tuple[str, ...]
    load: float


def kills(workers: int, supervisors: int, agents: int, seed: int) -> Iterator[Kill]:
    """Yield the plan that *seed* draws: ranks in turn, moments spread over start, steps, snapshots, evaluations."""
    draw = random.Random(seed)
    moments = ("start", "step", "snapshot", "evaluation", "step")
    victims = [f"worker {i % 2}" for i in range(workers)] + ["supervisor"] * supervisors + ["agent"] * agents
    for number, victim in enumerate(victims, 1):
        moment = moments[(number - 1) // 2 % len(moments)] if victim.startswith("worker") else "step"
        if victim in ("supervisor", "agent"):
            moment = moments[(number - 1) % len(moments)]
        at = {
            "start": draw.random(),
            "step": float(draw.randrange(1, STEPS - 15)),
            "snapshot": float(SNAPSHOT_EVERY * draw.randrange(1, STEPS // SNAPSHOT_EVERY)),
            "evaluation": float(-(-STEPS_PER_EPOCH * draw.randrange(1, 9) // 1)),
        }[moment]
        yield Kill(number, victim, moment, at)


class Watch:
    """Follows rank 0's log of the first generation closely enough to hit a moment of milliseconds."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._log = running.run.rank_log(1, 0)
        self._at = 0

    def until(self, kill: Kill) -> None:
        """Return at the moment of *kill*."""
        if kill.moment == "start":
            self._running.wait_for("workers", lambda: self._running.state().get("workers"))
            time.sleep(kill.at)
            return
        event = events.SNAPSHOT_STAGED if kill.moment == "snapshot" else events.STEP
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if any(line["event"] == event and line["step"] >= kill.at for line in self._new()):
                return
            if self._running.process.poll() is not None:
                pytest.fail(f"ended before the kill:\n{self._running.told()}")
            time.sleep(0.001)
        pytest.fail(f"no {kill.planned()} within {LIMIT_S} s")

    def _new(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
        self._at += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


def strike(project: Project, kill: Kill) -> Outcome:
    """Run the main job, kill, let it end (a run without supervisor by the same command again), and look."""
    run_id = f"kill-{kill.number:02d}"
    running = project.run("jobs/mnist.toml", run_id)
    Watch(running).until(kill)
    pid = _victim(running, kill.victim)
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    problems = []
    if kill.victim == "supervisor":
        running.process.wait()
        if left := wait_gone(run_id, 1.0):
            problems.append(f"{len(left)} processes alive a second after the supervisor")
        running = project.run("jobs/mnist.toml", run_id)
    code = running.end(LIMIT_S)
    if left := wait_gone(run_id):
        problems.append(f"{len(left)} processes left")
    if code != 0:
        problems.append(f"exit code {code}")
    return _judge(running, kill, killed_at, problems)


def _victim(running: Running, name: str) -> int:
    if name == "supervisor":
        return running.process.pid
    if name == "agent":
        return next(p.pid for p in running.tree() if "elasticflow.launcher.agent.main" in p.cmdline())
    return running.pid_of(int(name.removeprefix("worker ")))


def _judge(running: Running, kill: Kill, killed_at: float, problems: list[str]) -> Outcome:
    happened, state = running.events(), running.state()
    logged = [r for r in read_lines(running.run.rank_log(1, 0)) if r["event"] == events.STEP]
    step = logged[-1]["step"] if logged else 0
    committed = [
        e["step"] for e in named(happened, events.SNAPSHOT_COMMITTED) if _time(e["timestamp"]) <= killed_at
    ]
    generations = [e["generation"] for e in named(happened, events.GENERATION_STARTED)]
    if generations != [1, 2]:
        problems.append(f"generations {generations}")
    restored = [e["step"] for e in named(happened, events.TRAINING_STARTED) if e["generation"] == 2]
    first = [e for e in named(happened, events.TRAINING_FIRST_STEP) if e["generation"] == 2]
    if state["status"] != "finished":
        problems.append(f"status {state['status']}")
    if state["restarts"] != int(kill.victim != "supervisor"):
        problems.append(f"{state['restarts']} restarts")
    redone = step - restored[0] if restored else -1
    if not 0 <= redone <= step - max(committed, default=0):
        problems.append(f"{redone} steps done again, last snapshot at {max(committed, default=0)}")
    if steps_of(running.run) != list(range(1, STEPS + 1)):
        problems.append("metrics with gaps or repeats")
    evaluated = [r["step"] for r in read_lines(running.run.metrics) if "eval" in r]
    if evaluated != [-(-STEPS_PER_EPOCH * epoch // 1) for epoch in range(1, 11)]:
        problems.append(f"evaluations at {evaluated}")
    seconds = _time(first[0]["timestamp"]) - killed_at if first else float("nan")
    load = os.getloadavg()[0]
    return Outcome(kill, step, redone, seconds, state["restarts"], state["status"], tuple(problems), load)


def _time(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def table(outcomes: list[Outcome], seed: int) -> str:
    """Return the Markdown table and its summary."""
    load = [o.load for o in outcomes]
    at = head()
    lines = [
        "# Kills",
        "",
        f"{at['date']}, {at['facts']}, {at['cores']} cores shared with other work",
        f"(load average {min(load):.1f} to {max(load):.1f}, median {median(load):.1f}). Made by `python -m tests.measured.campaign.kills`.",
        "",
        f"`kill -9` over {len(outcomes)} separate runs of `jobs/mnist.toml` (two CPU workers, {STEPS} steps, a",
        f"snapshot every {SNAPSHOT_EVERY} steps and at each epoch's end), at moments drawn from the seed {seed}.",
        "*At step*: last step finished before the kill. *Again*: steps done again afterwards. *Seconds*: from the kill",
        "to the end of the next step; after a kill of the supervisor the same command is given again at once, and",
        "Python and torch start anew. *As required*: exit code 0, one restart and no other, no more steps done again",
        "than since the last snapshot, metrics without gaps or repeats, no process left.",
        "",
        "| run | killed | moment | at step | again | seconds | restarts | outcome | as required |",
        "|---:|---|---|---:|---:|---:|---:|---|---|",
    ]
    lines += [
        f"| {o.kill.number} | {o.kill.victim} | {o.kill.planned()} | {o.step} | {o.redone} | {o.seconds:.2f} "
        f"| {o.restarts} | {o.status} | {'yes' if not o.problems else '; '.join(o.problems)} |"
        for o in outcomes
    ]
    lines += [
        "",
        "| killed | runs | as required | again, median | max | seconds, median | max |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for victim in ("worker", "supervisor", "agent"):
        some = [o for o in outcomes if o.kill.victim.startswith(victim)]
        if some:
            redone, seconds = [o.redone for o in some], [o.seconds for o in some]
            good = sum(not o.problems for o in some)
            lines.append(
                f"| {victim} | {len(some)} | {good} | {median(redone):g} | {max(redone)} "
                f"| {median(seconds):.2f} | {max(seconds):.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Kill, print one line a run, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=20)
    options.add_argument("--supervisors", type=int, default=5)
    options.add_argument("--agents", type=int, default=5)
    options.add_argument("--seed", type=int, default=SEED, help="another than the default writes no table")
    options.add_argument("--only", type=int, nargs="*", help="numbers of the runs; writes no table")
    options.add_argument("--keep", type=Path, help="folder for the project, kept afterwards")
    given = options.parse_args()
    root = given.keep or Path(tempfile.mkdtemp(prefix="kills-"))
    root.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text('[project]\nname = "trial"\nversion = "0"\n')
    for part in ("examples", "jobs"):
        shutil.copytree(ROOT / part, root / part, dirs_exist_ok=True)
    project = Project(root)
    outcomes = []
    try:
        for kill in kills(given.workers, given.supervisors, given.agents, given.seed):
            if not given.only or kill.number in given.only:
                outcomes.append(strike(project, kill))
                print(outcomes[-1], flush=True)
    finally:
        for running in project.started:
            with suppress(ProcessLookupError):
                if running.process.poll() is None:
                    os.kill(running.process.pid, signal.SIGKILL)
    text = table(outcomes, given.seed)
    if given.seed != SEED:
        print(text)
    elif not given.only:
        TABLE.write_text(text, encoding="utf-8")
    if given.keep is None:
        shutil.rmtree(root)
    return int(any(o.problems for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
