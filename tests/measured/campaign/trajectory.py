"""Disturb runs in every way and find each sample trained on once and, with virtual shards, no bit otherwise.

By hand: `python -m tests.measured.campaign.trajectory --schedules 10 --seeds 20`. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import project_at
from tests.end_to_end.trajectory_jobs import (
    EPOCHS,
    MODELS,
    Act,
    count,
    digest,
    disturb,
    draw_sets,
    write_jobs,
)
from tests.end_to_end.trajectory_models import COUNTED, STEPS
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

SEED = 20261121
TABLE = Path(__file__).with_name("trajectory.md")
WORLDS, PLAIN_WORLDS, PROCESSES = (1, 2, 3, 4, 5), (1, 2, 3), (0, 2)
TAILS = ("spill", "short", "drop")

TEXT = """# Trajectories

{date}, {facts}, {cores} cores shared with other work; {minutes} min.
Made by `python -m tests.measured.campaign.trajectory`.

## The same bits

{steps} steps of three models (`tests/end_to_end/trajectory_models.py`) in 8 virtual shards: an MLP with dropout; a CNN
with BatchNorm and dropout; a transformer with dropout, tied weights, clipping, EMA and bf16 autocast. All with AdamW,
warm-up and cosine schedule, noise in the data, batches of 16 of 100 samples and a short one at each epoch's end. A
digest is the SHA-256 of every step's loss and every tensor of the last snapshot, optimizer and all. Beside it the same
jobs with `consistency = "batch"`, which is DistributedDataParallel.

| model | workers | 0 loader processes | 2 loader processes | DistributedDataParallel |
|---|---:|---|---|---|
{same}

The same jobs disturbed, drawn from the seed {seed}. *Done*: **workers and loader processes** of each launch; *kill 1
@7*: kill -9 of rank 1 once step 7 is finished; *kill all*: kill -9 of every process; *drain*: SIGTERM. *As
undisturbed*: every step's loss, done again or not, and every tensor at the end have the bits of the run above.

| run | done | digest | as undisturbed |
|---|---|---|---|
{disturbed}

## Every sample once

{epochs} epochs of {samples} samples; a parameter counts how often each was trained on. Launches differ in batch size
and most samples of a forward, too. *Once*: in every snapshot and at the end the parameter counts each sample as often
as the schedule has it up to there ({epochs} times at the end; with `drop`, less what the batch size in force leaves
over), and the samples of each line in metrics.jsonl add up to it.

| run | done | samples | once |
|---|---|---:|---|
{counted}
"""


@dataclass(frozen=True)
class Disturbed:
    """One run that was disturbed: what it was, what was done to it, what came of it."""

    name: str
    acts: str
    found: str
    problems: tuple[str, ...]

    def row(self) -> str:
        """Return its line of the table."""
        return f"| {self.name} | {self.acts} | {self.found} | {'; '.join(self.problems) or 'yes'} |"


def draw_acts(
    draw: random.Random, steps: int, *, counting: bool = False
) -> tuple[tuple[str, ...], list[Act]]:
    """Return what the first launch has otherwise than the job, and acts of every kind, spread over *steps*."""
    first = sets = draw_sets(draw, counting=counting)
    kinds = ["worker", "drain", "everything", "worker", *(["drain", "everything"] if counting else [])]
    draw.shuffle(kinds)
    acts = []
    for step, kind in zip(sorted(draw.sample(range(1, steps * 2 // 3), len(kinds))), kinds, strict=True):
        if kind == "worker":
            workers = int(sets[0].rpartition("=")[2])
            acts.append(Act(step, f"worker {draw.randrange(workers)}"))
        else:
            sets = draw_sets(draw, counting=counting)
            acts.append(Act(step, kind, sets))
    return first, acts


def in_words(first: tuple[str, ...], acts: list[Act]) -> str:
    """Return what was done: `2w 0p`, `kill 1 @7`, `drain @12`, `1w 2p`, ...; *all* is kill -9 of everything."""

    def launch(sets: tuple[str, ...]) -> str:
        units = zip(("w", "p", " a batch", " at once"), sets, strict=False)
        return "**" + " ".join(f"{text.rpartition('=')[2]}{unit}" for unit, text in units) + "**"

    words = [launch(first)]
    for act in acts:
        what = act.what.replace("worker", "kill").replace("everything", "kill all")
        words += [f"{what} @{act.step}", *([launch(act.sets)] if act.sets else [])]
    return ", ".join(words)


def undisturbed(project: Project, job: str, world_size: int, processes: int) -> dict[str, Any]:
    """Return what a run that nobody disturbs comes to."""
    sets = (f"nodes.nproc_per_node={world_size}", f"dataset.num_workers={processes}")
    outcome = Outcome("", "")
    found = Series(project, f"{job}-w{world_size}-p{processes}", *sets, job=job).finish(None, outcome)
    if outcome.problems or len(found["losses"]) != STEPS:
        raise RuntimeError(f"{job}, {world_size} workers: {outcome.problems}")
    print(job, world_size, processes, digest(found)[:16], flush=True)
    return found


def exact(project: Project, model: str, seed: int, expected: dict[str, Any]) -> Disturbed:
    """Disturb a run of *model* and compare every step and the end with *expected*."""
    first, acts = draw_acts(random.Random(f"{SEED} {model} {seed}"), STEPS)
    series, outcome = Series(project, f"{model}-{seed}", *first, job=model), Outcome("", "")
    disturb(series, acts, outcome)
    found = series.finish(expected, outcome)
    return Disturbed(
        f"{model} {seed}", in_words(first, acts), f"`{digest(found)[:16]}`", tuple(outcome.problems)
    )


def counting(project: Project, number: int) -> Disturbed:
    """Disturb a run that counts its samples, batch size and all, and look at the counts and the ledger."""
    tail = TAILS[number % len(TAILS)]
    first, acts = draw_acts(random.Random(f"{SEED} counting {number}"), EPOCHS * COUNTED // 24, counting=True)
    series = Series(project, f"counting-{number}", f"dataset.tail={tail}", *first, job="counting")
    outcome = Outcome("", "")
    acts = [Act(act.step, act.what, (f"dataset.tail={tail}", *act.sets) if act.sets else ()) for act in acts]
    disturb(series, acts, outcome)
    series.finish(None, outcome)
    launches = [first, *(act.sets[1:] for act in acts if act.sets)]
    sizes = [int(sets[2].rpartition("=")[2]) for sets in launches]
    samples = count(series, tail, sizes, outcome)
    shown = [Act(act.step, act.what, act.sets[1:]) for act in acts]
    return Disturbed(f"{number} {tail}", in_words(first, shown), str(samples), tuple(outcome.problems))


def table(
    digests: dict[str, dict[tuple[int, int], str]],
    plain: dict[str, dict[int, str]],
    disturbed: list[Disturbed],
    counted: list[Disturbed],
    minutes: float,
) -> str:
    """Return the Markdown tables."""
    same = "\n".join(
        f"| {model} | {world} | `{found[world, 0][:16]}` | `{found[world, 2][:16]}` "
        f"| {f'`{plain[model][world][:16]}`' if world in plain[model] else ''} |"
        for model, found in digests.items()
        for world in WORLDS
    )
    return TEXT.format(
        **head(), minutes=f"{minutes:.0f}",
        steps=STEPS, seed=SEED, epochs=EPOCHS, samples=COUNTED, same=same,
        disturbed="\n".join(run.row() for run in disturbed), counted="\n".join(run.row() for run in counted),
    )  # fmt: skip


def main() -> int:
    """Disturb, print one line a run, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--schedules", type=int, default=10, help="runs that count their samples")
    options.add_argument("--seeds", type=int, default=20, help="disturbed runs of each model")
    options.add_argument("--only", nargs="*", help="models, or `counting`; writes no table")
    given = options.parse_args()
    began, models = time.monotonic(), [name for name in MODELS if given.only is None or name in given.only]
    digests: dict[str, dict[tuple[int, int], str]] = {}
    plain: dict[str, dict[int, str]] = {}
    disturbed, counted = [], []
    with (
        tempfile.TemporaryDirectory(prefix="trajectory-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        write_jobs(project)
        for model in models:
            found = {(w, p): undisturbed(project, model, w, p) for w in WORLDS for p in PROCESSES}
            digests[model] = {at: digest(one) for at, one in found.items()}
            plain[model] = {w: digest(undisturbed(project, f"plain-{model}", w, 0)) for w in PLAIN_WORLDS}
            for seed in range(1, given.seeds + 1):
                disturbed.append(exact(project, model, seed, found[1, 0]))
                print(disturbed[-1].row(), flush=True)
        for number in range(1, given.schedules + 1) if given.only is None or "counting" in given.only else ():
            counted.append(counting(project, number))
            print(counted[-1].row(), flush=True)
    if given.only is None:
        text = table(digests, plain, disturbed, counted, (time.monotonic() - began) / 60)
        TABLE.write_text(text, encoding="utf-8")
    is_one = all(len(set(found.values())) == 1 for found in digests.values())
    differ = all(len({*found.values(), *digests[name].values()}) == 4 for name, found in plain.items())
    good = is_one and differ and not any(run.problems for run in [*disturbed, *counted])
    print("as required" if good else "NOT as required", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
