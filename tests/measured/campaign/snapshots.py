"""Kill everything everywhere inside a save and a load, and find no snapshot lost, half there or wrongly loaded.

By hand: `python -m tests.measured.campaign.snapshots`. The table lies beside this file.
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
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.system import fault_injection
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import LIMIT_S, project_at
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

SEED = 20261121
TABLE = Path(__file__).with_name("snapshots.md")
EVERY, EPOCHS = 5, 110
SETS = (
    f"train.epochs={EPOCHS}",
    "evaluation.every=55 epochs",
    f"snapshots.every={EVERY} steps",
    "restarts.budget=10000",
)
VICTIMS = ("worker 0", "worker 1", "writer", "agent", "everything")
MEMORY = ("tier.", "restore.before_recall")  # points that are passed with the memory tier only
PATIENCE_S = 1.5


def disturb(
    project: Project, victim: str, points: list[str], expected: dict[str, Any], *sets: str
) -> list[Outcome]:
    """Halt the process that reaches each point in turn, kill *victim*, let the halted one continue, and look."""
    cues = project.root / f"cues-{victim.replace(' ', '-')}-{len(sets)}"
    cues.mkdir()
    clauses = ", ".join(f"{point}=stop cue={cues / point}" for point in fault_injection.POINTS)
    series = Series(project, cues.name, *SETS, *sets, **{fault_injection.VARIABLE: clauses})
    generation, outcomes = series.settle(0), []
    for point in points:
        outcome = Outcome(victim, point)
        outcomes.append(outcome)
        (cues / point).touch()
        if not _taken(cues, point, PATIENCE_S):
            series.kill("worker 1")  # a point that only a new generation passes
            if not _taken(cues, point, LIMIT_S):
                outcome.problems.append("was not reached")
                continue
        (halted,) = cues.glob(f"{point}.[0-9]*")
        pid = int(halted.suffix[1:])
        began, step = time.monotonic(), series.step()
        generation = max(
            (e["generation"] for e in series.named(events.GENERATION_STARTED)), default=generation
        )
        newest = series.catalog.newest()
        series.kill(victim)
        if victim == "everything":
            series.resume()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        outcome.lost = max(0, step - series.restored(generation, outcome, newest.step if newest else 0))
        outcome.seconds = time.monotonic() - began
        generation = series.settle(generation)
        print(outcome, flush=True)
    series.finish(expected, outcomes[-1])
    return outcomes


def _taken(cues: Path, point: str, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not (cues / point).exists():
            return True
        time.sleep(0.005)
    return False


def terminate(project: Project, times: int, expected: dict[str, Any]) -> list[Outcome]:
    """SIGTERM to one rank at random moments: all leave after the same step with exactly one snapshot, and go on from it."""
    chance = random.Random(SEED)
    series, generation, outcomes = Series(project, "sigterm", *SETS), 0, []
    for _ in range(times):
        outcome = Outcome("SIGTERM", "any moment")
        outcomes.append(outcome)
        generation = series.trains(generation)
        time.sleep(chance.uniform(0, 0.6))
        process = series.wait("a worker", lambda: series.process(f"worker {chance.randrange(2)}"))
        began = time.monotonic()
        process.terminate()
        started = series.started(generation)
        outcome.seconds = time.monotonic() - began
        (ended,) = [e for e in series.named(events.GENERATION_ENDED) if e["generation"] == generation]
        here = [e for e in series.named(events.SNAPSHOT_COMMITTED) if e["step"] == ended["step"]]
        if ended["class"] != "drained":
            outcome.problems.append(f"generation ended: {ended['class']}")
        if len(here) != 1 or started["restored_from"] != here[0]["name"]:
            outcome.problems.append(
                f"{len(here)} snapshots at step {ended['step']}, resumed from {started['step']}"
            )
        outcome.lost = ended["step"] - started["step"]
    series.finish(expected, outcomes[-1])
    return outcomes


def table(outcomes: list[Outcome], seconds: float) -> str:
    """Return the Markdown tables."""
    made = head()
    lines = [
        "# Faults inside saves and loads",
        "",
        f"{made['date']}, {made['facts']}, {made['cores']} cores shared with other work; {seconds / 60:.0f} min.",
        "Made by `python -m tests.measured.campaign.snapshots`.",
        "",
        f"`jobs/mnist.toml` with two CPU workers, {EPOCHS} epochs and a snapshot every {EVERY} steps, in one long run for each",
        "victim. At each fault point (`elasticflow/system/fault_injection.py`) the process that reaches it is halted there, the victim is",
        "killed by `kill -9`, and whoever was halted and still lives continues; after *everything*, the run is resumed by",
        f"the command. SIGTERM goes to one rank, drawn from the seed {SEED}, within 0.6 s of a first step.",
        "*Survived*: training resumed from the newest snapshot that was committed, which verified, byte for byte; nothing",
        "was rejected or left behind; after SIGTERM there is exactly one snapshot of the step all ranks left at. *Wrongly",
        "loaded*: a restored snapshot whose bytes are not what was written, or a step, done again or not, whose loss is",
        "not bit for bit that of the undisturbed run, or other weights at the end.",
        "",
        "| victim | faults tried | survived | steps lost, median | max | snapshots wrongly loaded |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for victim in dict.fromkeys(outcome.victim for outcome in outcomes):
        some = [o for o in outcomes if o.victim == victim]
        lost = [o.lost for o in some]
        lines.append(
            f"| {victim} | {len(some)} | {sum(not o.problems for o in some)} | {median(lost):g} | {max(lost)} "
            f"| {sum(o.is_wrongly_loaded for o in some)} |"
        )
    lost = [o.lost for o in outcomes]
    lines.append(
        f"| all | {len(outcomes)} | {sum(not o.problems for o in outcomes)} | {median(lost):g} | {max(lost)} "
        f"| {sum(o.is_wrongly_loaded for o in outcomes)} |"
    )
    victims = [v for v in dict.fromkeys(o.victim for o in outcomes) if v != "SIGTERM"]
    lines += ["", "Steps lost, by the point and by who was killed there:", ""]
    lines += ["| point | " + " | ".join(victims) + " |", "|---|" + "---:|" * len(victims)]
    at = {(o.point, o.victim): o for o in outcomes}
    for point in fault_injection.POINTS:
        cells = [at.get((point, victim)) for victim in victims]
        if any(cells):
            texts = ["" if o is None else str(o.lost) + ("" if not o.problems else " (!)") for o in cells]
            lines.append(f"| {point} | " + " | ".join(texts) + " |")
    problems = [f"- {o.victim} at {o.point}: {'; '.join(o.problems)}" for o in outcomes if o.problems]
    return "\n".join([*lines, *(["", "Not as required (!):", "", *problems] if problems else [])]) + "\n"


def main() -> int:
    """Disturb, print one line a fault, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", help="fault points; writes no table")
    options.add_argument(
        "--victims", nargs="*", default=[*VICTIMS, "SIGTERM"], help="writes no table if given"
    )
    options.add_argument("--times", type=int, default=50, help="how often SIGTERM")
    given = options.parse_args()
    began, outcomes = time.monotonic(), []
    points = given.only or list(fault_injection.POINTS)
    stored = [point for point in points if not point.startswith(MEMORY)]
    held = [point for point in points if point.startswith(MEMORY)]
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        undisturbed = Series(project, "undisturbed", *SETS)
        expected = undisturbed.finish(None, Outcome("", ""))
        for victim in given.victims:
            if victim == "SIGTERM":
                outcomes += terminate(project, given.times, expected)
                continue
            outcomes += disturb(project, victim, stored, expected) if stored else []
            if held and victim.startswith("worker"):
                outcomes += disturb(project, victim, held, expected, "snapshots.memory=1 step")
    text = table(outcomes, time.monotonic() - began)
    print(text)
    if not given.only and given.victims == [*VICTIMS, "SIGTERM"]:
        TABLE.write_text(text, encoding="utf-8")
    return int(any(o.problems for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
