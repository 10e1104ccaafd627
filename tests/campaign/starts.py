"""Kill agents, writers and fork servers at random moments of start, restart and resume, and find no bit changed.

By hand: `python -m tests.campaign.starts`; the table lies beside this file. Each run takes three kills: one while it
starts, one while it restarts after a worker was killed, one while it is resumed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from tests.campaign import tiny_job
from tests.campaign.disturbed import Outcome, Series
from tests.campaign.facts import head
from tests.end_to_end.harness import named, project_at, read_lines, wait_gone

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from tests.end_to_end.harness import Project

SEED = 20261122
TABLE = Path(__file__).with_name("starts.md")
STEPS, EVERY, BUDGET = 300, 5, 100
PAUSE_S = 0.01
RUNS = 20
VICTIMS = {
    "agent": "elasticflow.launcher.agent.main",
    "writer": "elasticflow.snapshots.writer.main",
    "fork server": "elasticflow.launcher.fork_server.server",
}
MOMENTS = ("start", "restart", "resume")
# A restart takes this long where nothing else runs; a start as long as the undisturbed one took.
RESTART_S = 0.3


@dataclass
class Kill:
    """One kill and what came of it; without problems all was as it must be.

    Attributes:
        run: Number of the run, from 0.
        victim: Of `VICTIMS`.
        moment: Of `MOMENTS`.
        at_s: Seconds after the moment began; a victim that is not there then is killed as soon as it is.
        has_trained: Whether the generation that the moment is about had finished a step before.
        seconds: From the kill to the next finished step.
        problems: In words.
    """

    run: int
    victim: str
    moment: str
    at_s: float
    has_trained: bool = False
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def plan(runs: int, start_s: float) -> list[list[Kill]]:
    """Return the kills of each run, the same at every call but for how long a start takes: *start_s*."""
    draw = random.Random(SEED)
    names = list(VICTIMS)
    longest = {"start": start_s, "restart": RESTART_S, "resume": start_s}
    return [
        [
            Kill(run, names[(run + place) % len(names)], moment, draw.uniform(0, longest[moment]))
            for place, moment in enumerate(MOMENTS)
        ]
        for run in range(runs)
    ]


class Struck:
    """One run that takes the kills of a plan, in their order."""

    def __init__(self, project: Project, series: Series) -> None:
        self.project, self.series = project, series

    def take(self, kill: Kill) -> None:
        """Bring the moment about, kill, and return once training goes on."""
        before = len(self.series.named(events.TRAINING_FIRST_STEP))
        if kill.moment == "restart":
            psutil.Process(self.series.running.pid_of(1)).kill()
        elif kill.moment == "resume":
            self._leave()
            self.series.resume()
        time.sleep(kill.at_s)
        self.series.wait(kill.victim, lambda: self._killed(kill.victim))
        killed_at = time.time()
        kill.has_trained = len(self.series.named(events.TRAINING_FIRST_STEP)) > before

        def went_on() -> float | None:
            later = [moment_of(e) for e in self.series.named(events.TRAINING_FIRST_STEP)]
            return next((at for at in later if at > killed_at), None)

        kill.seconds = self.series.wait("a step after the kill", went_on) - killed_at

    def end(self, expected: dict[str, Any]) -> list[str]:
        """Let the run come to its end; return what is not as in *expected*."""
        tiny_job.hurry(self.project)
        outcome = Outcome("", "")
        self.series.finish(expected, outcome)
        if self.series.running.state()["status"] != "finished":
            outcome.problems.append(f"status {self.series.running.state()['status']}")
        if self.series.named(events.RUN_FAILED):
            outcome.problems.append("a launch failed")
        if left := wait_gone(self.series.running.run.run_id):
            outcome.problems.append(f"{len(left)} processes left")
        return outcome.problems

    def _leave(self) -> None:
        """Have the launch end as somebody asked it to."""
        self.series.running.process.send_signal(signal.SIGTERM)
        code = self.series.running.end()
        assert code == 75, self.series.running.told()

    def _killed(self, victim: str) -> bool:
        for process in self.series.running.tree():
            with suppress(psutil.Error):
                # Workers bear the command line of the fork server that they came from.
                parent = process.parent()
                is_worker = parent is not None and VICTIMS["fork server"] in parent.cmdline()
                if VICTIMS[victim] in process.cmdline() and not is_worker:
                    process.kill()
                    return True
        return False


def moment_of(event: dict[str, Any]) -> float:
    """Return the unix time of *event*."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def start_seconds(run: RunFolder) -> float:
    """Return how long the run took from its first event to its first step."""
    happened = read_lines(run.events)
    return moment_of(named(happened, events.TRAINING_FIRST_STEP)[0]) - moment_of(happened[0])


def strike(project: Project, kills: list[Kill], expected: dict[str, Any]) -> None:
    """Do the *kills* of one run, and note in each what was not as it must be."""
    tiny_job.reset(project)
    name = f"starts-{kills[0].run}-{os.getpid()}"
    struck = Struck(project, Series(project, name, job="tiny", TINY_PAUSE_S=str(PAUSE_S)))
    for kill in kills:
        struck.take(kill)
        print(kill, flush=True)
    problems = struck.end(expected)
    print(struck.series.running.run.run_id, problems or "as undisturbed", flush=True)
    for kill in kills:
        kill.problems += problems


TEXT = """# Starts

{date}, {facts}, {cores} cores shared with other work; commit {commit}.
Made by `python -m tests.campaign.starts`.

`kill -9` of an agent, a snapshot writer or a fork server, {kills} times over {runs} runs of a tiny job in exact mode (two
workers, {steps} steps, a snapshot every {every}). Each run takes three: one at a random moment of its start, one of a
restart (a worker is killed 0 to {restart_s:g} s before), one of its resumption after a drain. A start took {start_s:.1f} s
undisturbed; moments are drawn from the seed {seed}. *As required*: training goes on by itself, every launch ends with exit
code 0 (75 where it was drained), no launch fails, every loss and every bit of the last snapshot is that of an undisturbed
run, no process is left. *Before a step*: the kill hit before the generation had finished one.

| killed | moment | kills | as required | before a step | seconds to the next step, median | max |
|---|---|---:|---:|---:|---:|---:|
{rows}

{problems}"""


def table(kills: list[Kill], start_s: float) -> str:
    """Return the Markdown table."""
    rows = []
    for victim in VICTIMS:
        for moment in MOMENTS:
            some = [kill for kill in kills if (kill.victim, kill.moment) == (victim, moment)]
            if some:
                seconds = [kill.seconds for kill in some]
                good, early = sum(not k.problems for k in some), sum(not k.has_trained for k in some)
                rows.append(
                    f"| {victim} | {moment} | {len(some)} | {good} | {early} | {median(seconds):.1f} | {max(seconds):.1f} |"
                )
    wrong = [
        f"* run {k.run}, {k.victim} at {k.moment}, {k.at_s:.2f} s: {'; '.join(k.problems)}"
        for k in kills
        if k.problems
    ]
    good = sum(not kill.problems for kill in kills)
    return TEXT.format(
        **head(),
        kills=len(kills),
        runs=len({kill.run for kill in kills}),
        steps=STEPS,
        every=EVERY,
        restart_s=RESTART_S,
        start_s=start_s,
        seed=SEED,
        rows="\n".join(rows),
        problems="\n".join([f"{good} of {len(kills)} as required.", *wrong, ""]),
    )


def main() -> int:
    """Kill, print one line each, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, help="fewer than all; writes no table")
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="starts-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        tiny_job.write(project, STEPS, EVERY, BUDGET)
        expected = tiny_job.undisturbed(project, STEPS)
        start_s = start_seconds(project.started[-1].run)
        kills = plan(given.runs or RUNS, start_s)
        for of_run in kills:
            strike(project, of_run, expected)
    text = table([kill for of_run in kills for kill in of_run], start_s)
    print(text)
    if given.runs is None:
        TABLE.write_text(text, encoding="utf-8")
    return int(any(kill.problems for of_run in kills for kill in of_run))


if __name__ == "__main__":
    sys.exit(main())
