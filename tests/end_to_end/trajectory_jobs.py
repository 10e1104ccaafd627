"""Jobs whose trajectory is looked at, and what a run of one of them is disturbed by."""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticflow import events
from elasticflow.runtime.data.index_schedule import IndexSchedule
from tests.end_to_end import trajectory_models as models
from tests.end_to_end.harness import read_lines

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.end_to_end.disturbed import Outcome, Series
    from tests.end_to_end.harness import Project

SEED, EPOCHS = 77, 5
MODELS = {
    "mlp": ('entry = "trajectory_models:mlp"\nstep = "trajectory_models:mean_step"', "", ""),
    "cnn": ('entry = "trajectory_models:cnn"\nstep = "trajectory_models:sums_step"', "", ""),
    "transformer": (
        'entry = "trajectory_models:Transformer"\nstep = "trajectory_models:mean_step"',
        "clip_grad_norm = 1.0",
        'precision = "bf16"\nema = 0.9',
    ),
}

TRAINED = """
[job]
name = "{name}"
seed = {seed}

[model]
{model}

[optimizer]
entry = "torch.optim:AdamW"
args = {{ lr = 3e-3 }}
{clip}

[lr_scheduler]
entry = "trajectory_models:warm_cosine"
interval = "step"

[dataset]
entry = "trajectory_models:Images"
global_batch_size = 16
tail = "short"

[train]
steps = {steps}
{train}

[nodes]
nproc_per_node = 2

[restarts]
budget = 100

[snapshots]
every = "6 steps"
"""
EXACT = 'consistency = "exact"\nvirtual_shards = 8\n'

COUNTING = """
[job]
name = "counting"
seed = {seed}

[model]
entry = "trajectory_models:Counter"
step = "trajectory_models:count_step"

[optimizer]
entry = "trajectory_models:Tally"

[dataset]
entry = "trajectory_models:Numbers"
global_batch_size = 16

[train]
epochs = {epochs}

[nodes]
nproc_per_node = 2

[restarts]
budget = 100

[snapshots]
every = "5 steps"
keep = {{ last = 1000 }}
"""


def write_jobs(project: Project) -> None:
    """Put all jobs into *project*: each model as it is and as `plain-`, with DistributedDataParallel; and counting."""
    project.write("trajectory_models.py", Path(models.__file__).read_text(encoding="utf-8"))
    for name, (model, clip, train) in MODELS.items():
        for job, consistency in ((name, EXACT), (f"plain-{name}", "")):
            text = TRAINED.format(
                name=job, seed=SEED, steps=models.STEPS, model=model, clip=clip, train=consistency + train
            )
            project.write(f"jobs/{job}.toml", text)
    project.write("jobs/counting.toml", COUNTING.format(seed=SEED, epochs=EPOCHS))


@dataclass(frozen=True)
class Act:
    """What is done to a run once it has finished *step*.

    Attributes:
        what: `worker N`, `agent`: kill -9 of that rank or of the node's agent, a restart. `everything`: kill -9 of all processes.
            `drain`: SIGTERM.
        sets: Keys that the launch after it has otherwise, as `--set` takes them; of no use after a restart.
    """

    step: int
    what: str
    sets: tuple[str, ...] = ()


def disturb(series: Series, acts: Sequence[Act], outcome: Outcome) -> None:
    """Do *acts* one after the other, resume with their sets, and note in *outcome* what was not as it must be."""
    generation = 0
    for act in acts:
        generation = series.trains(generation)
        series.reach(act.step)
        is_restart = act.what.startswith("worker") or act.what == "agent"
        if is_restart or act.what == "everything":
            series.kill(act.what)
        else:
            os.kill(series.running.process.pid, signal.SIGTERM)
            if (code := series.running.end()) != 75:
                outcome.problems.append(f"exit code {code} after a drain")
        if not is_restart:
            series.resume(*(f"--set={text}" for text in act.sets), "--accept-drift")


def digest(found: dict[str, Any]) -> str:
    """Return the digest of every step's loss and every tensor of the last snapshot, of `Series.finish`."""
    total = sha256(repr(sorted(found["losses"].items())).encode())
    for key, data in sorted(found["bits"].items()):
        total.update(key.encode() + data)
    return total.hexdigest()


def count(series: Series, tail: str, sizes: Sequence[int], outcome: Outcome) -> int:
    """Return the samples trained on by an ended run of `counting`; note where its parameter or its ledger is wrong.

    Args:
        series: The run.
        tail: Of its dataset.
        sizes: Global batch size of each of its launches.
        outcome: Takes the problems.
    """
    counts_at = _replayed(series, tail, sizes, outcome)
    *_, last = counts_at.values()
    if tail != "drop" and last != [EPOCHS] * models.COUNTED:
        outcome.problems.append("a sample was repeated or lost")
    catalog, compared = series.catalog, set()
    for manifest in catalog.committed():
        place = manifest.tensors["model/counts"]
        data = catalog.storage.read(f"{catalog.folder()}/{manifest.location(place.file)}")
        counts = list(struct.unpack_from(f"<{models.COUNTED}f", data, place.offset))
        if sum(counts) != manifest.samples:
            outcome.problems.append(f"{manifest.name} counts {sum(counts):g} samples, not {manifest.samples}")
        at = manifest.step, manifest.generation
        if at in counts_at:  # else the step was done again
            compared.add(at)
            if counts != counts_at[at]:
                outcome.problems.append(f"{manifest.name} counts a sample wrong")
    if max(counts_at) not in compared:
        outcome.problems.append("no snapshot of the last step")
    return sum(last)


def _replayed(
    series: Series, tail: str, sizes: Sequence[int], outcome: Outcome
) -> dict[tuple[int, int], list[int]]:
    """Return by (step, generation) of metrics.jsonl how often the schedule has had each sample by then."""
    size_of, launch = {}, 0
    for event in series.look():
        launch += event["event"] == events.RUN_STARTED
        if event["event"] == events.GENERATION_STARTED:
            size_of[event["generation"]] = sizes[launch - 1]
    counts, found, position = np.zeros(models.COUNTED, dtype=np.int64), {}, None
    for line in read_lines(series.running.run.metrics):
        size = size_of[line["generation"]]
        schedule = IndexSchedule(models.COUNTED, size, epochs=EPOCHS, tail=tail, seed=SEED)
        offset, number, position = schedule.batch(position or schedule.start)
        np.add.at(
            counts, schedule.indices(np.arange(offset, offset + number)), 1
        )  # twice in a spilled batch, maybe
        found[line["step"], line["generation"]] = counts.tolist()
        if any(getattr(position, key) != line[key] for key in ("step", "samples", "epoch")):
            outcome.problems.append(f"step {line['step']} in metrics.jsonl is at {line['samples']} samples")
    return found


def draw_sets(draw: random.Random, *, counting: bool = False) -> tuple[str, ...]:
    """Return how a launch differs from the job, drawn at random: workers, loader processes, and batches if *counting*."""
    sets = [f"nodes.nproc_per_node={draw.randint(1, 5)}", f"dataset.num_workers={draw.choice([0, 0, 2])}"]
    if counting:
        sets += [
            f"dataset.global_batch_size={draw.randint(6, 24)}",
            f"dataset.micro_batch_size={draw.randint(2, 8)}",
        ]
    return tuple(sets)
