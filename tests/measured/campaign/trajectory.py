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
    from collections.abc import Callable, Sequence

    from tests.end_to_end.harness import Project

SEED = 20261121
TABLE = Path(__file__).with_name("trajectory.md")
WORLDS, PLAIN_WORLDS, PROCESSES = (1, 2, 3, 4, 5), (1, 2, 3), (0, 2)
TAILS = ("spill", "short", "drop")
KINDS = ("worker", "drain", "everything")
UNITS = {
    "nodes.nproc_per_node": "w",
    "dataset.num_workers": "p",
    "dataset.global_batch_size": " a batch",
    "dataset.micro_batch_size": " at once",
}

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
    """One run that was disturbed: its name, what was done to it in words and in number, what came of it."""

    name: str
    done: str
    found: str
    acts: int
    problems: tuple[str, ...]

    def row(self) -> str:
        """Return its line of the table."""
        return f"| {self.name} | {self.done} | {self.found} | {'; '.join(self.problems) or 'yes'} |"


def settings(sets: tuple[str, ...]) -> dict[str, str]:
    """Return the values of a launch by key."""
    return dict(text.split("=") for text in sets)


def draw_acts(
    draw: random.Random,
    steps: int,
    first: tuple[str, ...],
    kinds: Sequence[str],
    launch: Callable[[random.Random], tuple[str, ...]],
) -> list[Act]:
    """Return one act of each of *kinds*, in any order, spread over *steps*.

    Args:
        steps: Of the run; its last third is left in peace.
        first: The keys of the first launch.
        kinds: `worker` is kill -9 of any rank, the others are as in `Act`.
        launch: Draws the keys of the launch after an act that ends one.
    """
    order, sets, acts = list(kinds), first, []
    draw.shuffle(order)
    for step, kind in zip(sorted(draw.sample(range(1, steps * 2 // 3), len(order))), order, strict=True):
        if kind in ("worker", "agent"):
            rank = draw.randrange(int(settings(sets)["nodes.nproc_per_node"]))
            acts.append(Act(step, f"worker {rank}" if kind == "worker" else kind))
        else:
            sets = launch(draw)
            acts.append(Act(step, kind, sets))
    return acts


def in_words(first: tuple[str, ...], acts: Sequence[Act], launch: Callable[[tuple[str, ...]], str]) -> str:
    """Return what was done, each launch as *launch* words it: `**2w 0p**, kill 1 @7, drain @12, **1w 2p**`."""
    words = [f"**{launch(first)}**"]
    for act in acts:
        what = act.what
        for kind, word in (("worker", "kill"), ("agent", "kill agent"), ("everything", "kill all")):
            what = what.replace(kind, word)
        words += [f"{what} @{act.step}", *([f"**{launch(act.sets)}**"] if act.sets else [])]
    return ", ".join(words)


def undisturbed(
    project: Project, job: str, name: str, sets: tuple[str, ...], told: str = ""
) -> dict[str, Any]:
    """Return what a run that nobody disturbs comes to, and print it behind *told*, or else *name*."""
    outcome, told = Outcome("", ""), told or name
    found = Series(project, name, *sets, job=job).finish(None, outcome)
    if outcome.problems or len(found["losses"]) != STEPS:
        raise RuntimeError(f"{told}: {outcome.problems}")
    print(told, digest(found)[:16], flush=True)
    return found


def exact(name: str, series: Series, acts: Sequence[Act], done: str, expected: dict[str, Any]) -> Disturbed:
    """Disturb a run by *acts*, in words *done*, and compare every step and the end with *expected*."""
    outcome = Outcome("", "")
    disturb(series, acts, outcome)
    found = series.finish(expected, outcome)
    return Disturbed(name, done, f"`{digest(found)[:16]}`", len(acts), tuple(outcome.problems))


def launch_in_words(sets: tuple[str, ...]) -> str:
    """Return workers, loader processes and, if they are set, batch size and most samples of a forward."""
    return " ".join(f"{value}{UNITS[key]}" for key, value in settings(sets).items() if key in UNITS)


def with_workers(project: Project, job: str, world_size: int, processes: int) -> dict[str, Any]:
    """Return what an undisturbed run of *job* comes to with that many workers, and loader processes of each."""
    sets = (f"nodes.nproc_per_node={world_size}", f"dataset.num_workers={processes}")
    name = f"{job}-w{world_size}-p{processes}"
    return undisturbed(project, job, name, sets, told=f"{job} {world_size} {processes}")


def of_model(project: Project, model: str, seed: int, expected: dict[str, Any]) -> Disturbed:
    """Disturb a run of *model* as drawn from *seed*, and compare it with *expected*."""
    draw = random.Random(f"{SEED} {model} {seed}")
    first = draw_sets(draw)
    acts = draw_acts(draw, STEPS, first, (*KINDS, "worker"), draw_sets)
    series = Series(project, f"{model}-{seed}", *first, job=model)
    return exact(f"{model} {seed}", series, acts, in_words(first, acts, launch_in_words), expected)


def counting(project: Project, number: int) -> Disturbed:
    """Disturb a run that counts its samples, batch size and all, and look at the counts and the ledger."""
    tail = TAILS[number % len(TAILS)]

    def launch(draw: random.Random) -> tuple[str, ...]:
        return f"dataset.tail={tail}", *draw_sets(draw, counting=True)

    draw, outcome = random.Random(f"{SEED} counting {number}"), Outcome("", "")
    first = launch(draw)
    kinds = (*KINDS, "worker", "drain", "everything")
    acts = draw_acts(draw, EPOCHS * COUNTED // 24, first, kinds, launch)
    series = Series(project, f"counting-{number}", *first, job="counting")
    disturb(series, acts, outcome)
    series.finish(None, outcome)
    launches = [first, *(act.sets for act in acts if act.sets)]
    sizes = [int(settings(sets)["dataset.global_batch_size"]) for sets in launches]
    samples = count(series, tail, sizes, outcome)
    done = in_words(first, acts, launch_in_words)
    return Disturbed(f"{number} {tail}", done, str(samples), len(acts), tuple(outcome.problems))


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
            found = {(w, p): with_workers(project, model, w, p) for w in WORLDS for p in PROCESSES}
            digests[model] = {at: digest(one) for at, one in found.items()}
            plain[model] = {w: digest(with_workers(project, f"plain-{model}", w, 0)) for w in PLAIN_WORLDS}
            for seed in range(1, given.seeds + 1):
                disturbed.append(of_model(project, model, seed, found[1, 0]))
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
