"""Disturb sharded runs in every way, change degree and number of replicas between launches, and find no bit otherwise.

By hand: `python -m tests.measured.campaign.sharded --seeds 15`. The table lies beside this file.
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
from tests.end_to_end.trajectory_jobs import Act, digest, disturb, write_jobs
from tests.end_to_end.trajectory_models import STEPS
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

SEED = 20261126
TABLE = Path(__file__).with_name("sharded.md")
JOB = "transformer"
VIRTUAL_SHARDS = 12
DEGREES, REPLICAS = (1, 2, 3, 4), (1, 2, 3)
_FIXED = (f"train.virtual_shards={VIRTUAL_SHARDS}", "dataset.global_batch_size=24")

TEXT = """# Sharded runs

{date}, {facts}, {cores} cores shared with other work; {minutes} min.
Made by `python -m tests.measured.campaign.sharded`.

{steps} steps of a transformer with dropout, tied weights, clipping, EMA and bf16 autocast (`tests/end_to_end/trajectory_models.py`)
in {shards} virtual shards, AdamW, warm-up and cosine schedule, a short batch at each epoch's end, a snapshot every 6 steps.
A digest is the SHA-256 of every step's loss and every tensor of the last snapshot, the pieces of a tensor put together.

## One digest at every degree

*No table*: the job without `[parallel]`, one worker.

| `parallel.shard` | 1 replica | 2 replicas | 3 replicas |
|---:|---|---|---|
{same}

No table: `{alone}`.

## The same jobs disturbed

Drawn from the seed {seed}. *Done*: **degree x replicas** of each launch; *kill 1 @7*: kill -9 of rank 1 once step 7 is finished; *kill agent*:
kill -9 of the node's agent; *kill all*: kill -9 of every process; *drain*: SIGTERM. *As undisturbed*: every step's loss, done again or not,
and every tensor at the end have the bits of the runs above.

| run | done | digest | as undisturbed |
|---|---|---|---|
{disturbed}

{total} disturbances, {wrong} runs with anything otherwise.
"""


@dataclass(frozen=True)
class Disturbed:
    """A run that was disturbed: its acts in words, its digest, and everything that was not as it must be."""

    name: str
    done: str
    digest: str
    acts: int
    problems: tuple[str, ...]

    def row(self) -> str:
        """Return its line of the table."""
        return f"| {self.name} | {self.done} | `{self.digest}` | {'; '.join(self.problems) or 'yes'} |"


def sets_of(degree: int, replicas: int) -> tuple[str, ...]:
    """Return the keys of a launch with *replicas* replicas of *degree* workers each."""
    return (*_FIXED, f"parallel.shard={degree}", f"nodes.nproc_per_node={degree * replicas}")


def draw_acts(draw: random.Random) -> tuple[tuple[int, int], list[tuple[Act, tuple[int, int] | None]]]:
    """Return degree and replicas of the first launch, and acts of every kind with degree and replicas of a launch after each."""

    def form() -> tuple[int, int]:
        return draw.choice(DEGREES), draw.choice(REPLICAS)

    first = now = form()
    kinds = ["worker", "drain", "everything", draw.choice(["worker", "agent"])]
    draw.shuffle(kinds)
    acts: list[tuple[Act, tuple[int, int] | None]] = []
    for step, kind in zip(sorted(draw.sample(range(1, STEPS * 2 // 3), len(kinds))), kinds, strict=True):
        if kind in ("worker", "agent"):
            rank = draw.randrange(now[0] * now[1])
            acts.append((Act(step, f"worker {rank}" if kind == "worker" else "agent"), None))
        else:
            now = form()
            acts.append((Act(step, kind, sets_of(*now)), now))
    return first, acts


def in_words(first: tuple[int, int], acts: list[tuple[Act, tuple[int, int] | None]]) -> str:
    """Return the acts of a run: `**2 x 3**, kill 1 @7, drain @12, **1 x 2**`; *kill all* is kill -9 of everything."""
    words = [f"**{first[0]} x {first[1]}**"]
    for act, form in acts:
        what = (
            act.what.replace("worker", "kill")
            .replace("everything", "kill all")
            .replace("agent", "kill agent")
        )
        words += [f"{what} @{act.step}", *([f"**{form[0]} x {form[1]}**"] if form else [])]
    return ", ".join(words)


def undisturbed(project: Project, name: str, sets: tuple[str, ...]) -> dict[str, Any]:
    """Return what a run that nobody disturbs comes to."""
    outcome = Outcome("", "")
    found = Series(project, name, *sets, job=JOB).finish(None, outcome)
    if outcome.problems or len(found["losses"]) != STEPS:
        raise RuntimeError(f"{name}: {outcome.problems}")
    print(name, digest(found)[:16], flush=True)
    return found


def exact(project: Project, seed: int, expected: dict[str, Any]) -> Disturbed:
    """Disturb a run and compare every step and the end with *expected*."""
    first, acts = draw_acts(random.Random(f"{SEED} {seed}"))
    series, outcome = Series(project, f"sharded-{seed}", *sets_of(*first), job=JOB), Outcome("", "")
    disturb(series, [act for act, _ in acts], outcome)
    found = series.finish(expected, outcome)
    return Disturbed(str(seed), in_words(first, acts), digest(found)[:16], len(acts), tuple(outcome.problems))


def table(alone: str, digests: dict[tuple[int, int], str], disturbed: list[Disturbed], minutes: float) -> str:
    """Return the Markdown page."""
    same = "\n".join(
        f"| {degree} | " + " | ".join(f"`{digests[degree, replicas][:16]}`" for replicas in REPLICAS) + " |"
        for degree in DEGREES
    )
    return TEXT.format(
        **head(), minutes=f"{minutes:.0f}", steps=STEPS, shards=VIRTUAL_SHARDS, seed=SEED, same=same, alone=alone[:16],
        disturbed="\n".join(run.row() for run in disturbed),
        total=sum(run.acts for run in disturbed), wrong=sum(bool(run.problems) for run in disturbed),
    )  # fmt: skip


def main() -> int:
    """Disturb, print one line a run, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=15, help="disturbed runs")
    options.add_argument("--dry", action="store_true", help="write no table")
    given = options.parse_args()
    began = time.monotonic()
    disturbed = []
    with (
        tempfile.TemporaryDirectory(prefix="sharded-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        write_jobs(project)
        alone = undisturbed(project, "alone", (*_FIXED, "nodes.nproc_per_node=1"))
        digests = {
            (degree, replicas): digest(
                undisturbed(project, f"s{degree}-r{replicas}", sets_of(degree, replicas))
            )
            for degree in DEGREES
            for replicas in REPLICAS
        }
        for seed in range(1, given.seeds + 1):
            disturbed.append(exact(project, seed, alone))
            print(disturbed[-1].row(), flush=True)
    minutes = (time.monotonic() - began) / 60
    if not given.dry:
        TABLE.write_text(table(digest(alone), digests, disturbed, minutes), encoding="utf-8")
    is_one = set(digests.values()) == {digest(alone)}
    good = is_one and not any(run.problems for run in disturbed)
    print("as required" if good else "NOT as required", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
