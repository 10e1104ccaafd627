"""A run that resumes with another rate and other workers: the rate counts from the snapshot on, and the data is split alike."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, Running, named, read_lines

DATA = '''
import json
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset, random_split


def digits(split):
    """Split one set at random, as in many a notebook, and note what came of it."""
    images = torch.linspace(0, 1, 480 * 784).reshape(480, 1, 28, 28)
    full = TensorDataset(images, torch.arange(480) % 10)
    train, test = random_split(full, [400, 80])
    part = {"train": train, "test": test}[split]
    folder = Path("opened")
    folder.mkdir(exist_ok=True)
    (folder / f"{split}-{os.getpid()}.json").write_text(json.dumps(list(part.indices)))
    return part
'''
EPOCHS = 2000
SETS = (
    "dataset.entry=data:digits",
    "evaluation.entry=data:digits",
    f"train.epochs={EPOCHS}",
    f"lr_scheduler.args.T_max={EPOCHS}",
    f"snapshots.every={EPOCHS} epochs",
    # A killed worker goes back to before the change.
    "snapshots.memory=off",
    f"evaluation.every={EPOCHS} epochs",
    "optimizer.entry=torch.optim:SGD",
    "optimizer.args.momentum=0.9",
)


def interrupt(running: Running) -> int:
    """Have it end after a few steps; return how many generations there have been."""
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 75, running.told()
    return max(int(record["generation"]) for record in read_lines(running.run.metrics))


def test_changed_rate_counts_in_every_later_start_and_no_sample_changes_sides(project: Project) -> None:
    """Two workers are drained; one continues with another rate and is killed: the snapshot of before is restored once more.

    Every process opens the same two parts of one permutation for training and evaluation.
    """
    project.write("data.py", DATA)
    first = project.run("jobs/mnist.toml", "changed", *SETS, "optimizer.args.lr=0.01")
    first.wait_for_step(3)
    old = interrupt(first)
    begins_at = read_lines(first.run.metrics)[-1]["step"]

    changed = [f"--set={text}" for text in (*SETS, "optimizer.args.lr=0.03", "nodes.nproc_per_node=1")]
    command = ("run", "jobs/mnist.toml", "--run-id=changed", *changed)
    second = project.start(*command, "--accept-drift", run_id="changed")
    second.wait_for_step(begins_at + 3)
    os.kill(second.pid_of(0), signal.SIGKILL)
    second.wait_for_step(begins_at + 3, generation=old + 1)
    interrupt(second)
    require_changed_rate(second, old)

    train, test = splits(project, "train"), splits(project, "test")
    assert (4, 4) == (len(train), len(test))  # two workers, one, and one again
    assert sorted(train[0] + test[0]) == list(range(480))
    assert train == [train[0]] * 4
    assert test == [test[0]] * 4


def require_changed_rate(second: Running, old: int) -> None:
    """The change is told at both starts after generation *old*, and every step was made at the rate of its launch."""
    told = named(second.events(), events.OPTIONS_CHANGED)
    assert [event["generation"] for event in told] == [old + 1, old + 2], second.told()
    assert "optimizer group 0: lr 0.01 -> 0.03" in second.told()
    records = [record for record in read_lines(second.run.metrics) if "lr" in record]
    assert {record["generation"] for record in records} >= {old, old + 2}
    for record in records:
        rate = 0.01 if record["generation"] <= old else 0.03
        # The rate is that of the epoch in which the step was made, counted from 1; `epoch` says where it ended.
        wanted = rate * (1 + math.cos(math.pi * (record["in_epoch"] - 1) / EPOCHS)) / 2
        assert record["lr"] == pytest.approx(wanted, rel=1e-6), record


def splits(project: Project, part: str) -> list[list[int]]:
    """Return the samples that each process got for this part."""
    return [json.loads(path.read_text()) for path in sorted((project.root / "opened").glob(f"{part}-*.json"))]
