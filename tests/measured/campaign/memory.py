"""Kill workers and agents of runs that hold their state in memory by default, and count the steps that are done again.

By hand: `python -m tests.measured.campaign.memory`. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.end_to_end import tiny_job
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import project_at
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

SEED = 20261126
TABLE = Path(__file__).with_name("memory.md")
STEPS, EVERY = 400, 100
PAUSE_S = "0.005"
WORKERS = 2
KILLS_OF_A_RUN = 8
SETS = {
    "auto": ("snapshots.memory=auto",),
    "off": ("snapshots.memory=off",),
}

TEXT = """# Steps done again with the memory tier

{date}, {facts}, {cores} cores shared with other work; {minutes} min.
Made by `python -m tests.measured.campaign.memory`.

{steps} steps of a small job in exact mode ({workers} CPU workers, steps of some 10 ms), a snapshot every {every} steps, killed by `kill -9` at moments
drawn from the seed {seed}. *auto*: `snapshots.memory` as it is by default; *off*: the same moments without. *Again*: steps done again after
the kill. *From memory*: restarts that resumed from a held state. *As required*: exit code 0, every step's loss, done again or not, and every tensor at
the end have the bits of the undisturbed run, and no more steps were done again than since the last snapshot. A killed agent takes what its node holds
with it.

| memory | killed | kills | from memory | again, median | again, largest | seconds to the next step, median | as required |
|---|---|---:|---:|---:|---:|---:|---|
{rows}

{problems}
"""


def disturb(project: Project, kind: str, number: int, expected: dict[str, object]) -> list[Outcome]:
    """Kill workers in one run, and the agent once; return what came of each kill."""
    draw = random.Random(f"{SEED} {number}")
    tiny_job.reset(project)
    series = Series(project, f"{kind}-{number}", *SETS[kind], job="tiny", TINY_PAUSE_S=PAUSE_S)
    agent_at = draw.randrange(KILLS_OF_A_RUN)
    outcomes, generation = [], series.trains(0)
    for kill in range(KILLS_OF_A_RUN):
        outcome = Outcome("agent" if kill == agent_at else f"worker {draw.randrange(WORKERS)}", kind)
        series.reach(min(STEPS - 5, series.step() + draw.randrange(3, 30)))
        before, began = series.step(), time.monotonic()
        series.kill(outcome.victim)
        started = series.started(generation)
        generation = series.trains(generation)
        outcome.seconds = time.monotonic() - began
        outcome.lost = max(0, before - int(started["step"]))
        outcome.point = f"{kind}, from memory" if started["from_memory"] else kind
        if outcome.lost > EVERY + 2:
            outcome.problems.append(f"{outcome.lost} steps done again")
        outcomes.append(outcome)
    tiny_job.hurry(project)
    series.finish(expected, outcomes[-1])
    return outcomes


def row(kind: str, victim: str, outcomes: list[Outcome]) -> str:
    """Return one line of the table."""
    lost = [outcome.lost for outcome in outcomes]
    held = sum("memory" in outcome.point for outcome in outcomes)
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    seconds = median(outcome.seconds for outcome in outcomes)
    good = "all" if not wrong else f"{len(outcomes) - wrong}"
    return f"| {kind} | {victim} | {len(lost)} | {held} | {median(lost):g} | {max(lost)} | {seconds:.2f} | {good} |"


def table(outcomes: dict[str, list[Outcome]], minutes: float) -> str:
    """Return the Markdown page."""
    rows, problems = [], []
    for kind, found in outcomes.items():
        for victim in ("worker", "agent"):
            of_victim = [outcome for outcome in found if outcome.victim.startswith(victim)]
            rows.append(row(kind, victim, of_victim))
        problems += [f"- {each.victim}, {each.point}: {text}" for each in found for text in each.problems]
    total = sum(map(len, outcomes.values()))
    told = "\n".join(problems) or f"{total} kills, one digest: that of the undisturbed run."
    return TEXT.format(
        **head(), minutes=f"{minutes:.0f}", steps=STEPS, every=EVERY, workers=WORKERS, seed=SEED,
        rows="\n".join(rows), problems=told,
    )  # fmt: skip


def main() -> int:
    """Disturb, print one line a kill, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--runs", type=int, default=6, help=f"of each kind, with {KILLS_OF_A_RUN} kills each"
    )
    options.add_argument("--dry", action="store_true", help="write no table")
    given = options.parse_args()
    began = time.monotonic()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in SETS}
    with (
        tempfile.TemporaryDirectory(prefix="memory-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        tiny_job.write(project, STEPS, EVERY, 100)
        expected = tiny_job.undisturbed(project, STEPS)
        for kind in SETS:
            for number in range(given.runs if kind == "auto" else max(1, given.runs // 3)):
                for outcome in disturb(project, kind, number, expected):
                    print(kind, number, outcome, flush=True)
                    outcomes[kind].append(outcome)
    text = table(outcomes, (time.monotonic() - began) / 60)
    print(text)
    if not given.dry:
        TABLE.write_text(text, encoding="utf-8")
    return int(any(outcome.problems for found in outcomes.values() for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
