"""Disturb sharded runs in every way, change degree and number of replicas between launches, and find no bit otherwise.

By hand: `python -m tests.measured.campaign.sharded --seeds 15`. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.end_to_end.disturbed import Series
from tests.end_to_end.harness import project_at
from tests.end_to_end.trajectory_jobs import digest, write_jobs
from tests.end_to_end.trajectory_models import STEPS
from tests.measured.campaign.facts import head
from tests.measured.campaign.trajectory import KINDS, draw_acts, exact, in_words, settings, undisturbed

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project
    from tests.measured.campaign.trajectory import Disturbed

SEED = 20261127
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


def sets_of(degree: int, replicas: int) -> tuple[str, ...]:
    """Return the keys of a launch with *replicas* replicas of *degree* workers each."""
    return (*_FIXED, f"parallel.shard={degree}", f"nodes.nproc_per_node={degree * replicas}")


def draw_sets(draw: random.Random) -> tuple[str, ...]:
    """Return the keys of a launch, its degree and replicas drawn at random."""
    degree, replicas = draw.choice(DEGREES), draw.choice(REPLICAS)
    return sets_of(degree, replicas)


def launch_in_words(sets: tuple[str, ...]) -> str:
    """Return degree and replicas of a launch: `2 x 3`."""
    keys = settings(sets)
    degree = int(keys["parallel.shard"])
    return f"{degree} x {int(keys['nodes.nproc_per_node']) // degree}"


def of_seed(project: Project, seed: int, expected: dict[str, Any]) -> Disturbed:
    """Disturb a run by acts of every kind, as drawn from *seed*, and compare it with *expected*."""
    draw = random.Random(f"{SEED} {seed}")
    first = draw_sets(draw)
    acts = draw_acts(draw, STEPS, first, (*KINDS, draw.choice(["worker", "agent"])), draw_sets)
    series = Series(project, f"sharded-{seed}", *first, job=JOB)
    return exact(str(seed), series, acts, in_words(first, acts, launch_in_words), expected)


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
        alone = undisturbed(project, JOB, "alone", (*_FIXED, "nodes.nproc_per_node=1"))
        digests = {
            (degree, replicas): digest(
                undisturbed(project, JOB, f"s{degree}-r{replicas}", sets_of(degree, replicas))
            )
            for degree in DEGREES
            for replicas in REPLICAS
        }
        for seed in range(1, given.seeds + 1):
            disturbed.append(of_seed(project, seed, alone))
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
