"""Options that were changed on purpose count from the snapshot on, in every start that follows."""

from __future__ import annotations

import math
import os
import signal

import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, Running, named, read_lines

EPOCHS = 300
SETS = (
    f"train.epochs={EPOCHS}",
    f"lr_scheduler.args.T_max={EPOCHS}",
    "snapshots.every=1000 epochs",
    "evaluation.every=1000 epochs",
    "optimizer.entry=torch.optim:SGD",
    "optimizer.args.momentum=0.9",
)


def interrupt(running: Running) -> int:
    """Have it end after a few steps; return how many generations there have been."""
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 75, running.told()
    return max(int(record["generation"]) for record in read_lines(running.run.metrics))


def test_changed_rate_counts_in_every_later_start(project: Project) -> None:
    """Also where the snapshot of before the change is restored once more, after a kill."""
    first = project.run("jobs/mnist.toml", "changed", *SETS, "optimizer.args.lr=0.01")
    first.wait_for_step(3)
    old = interrupt(first)
    begins_at = read_lines(first.run.metrics)[-1]["step"]

    changed = [f"--set={text}" for text in (*SETS, "optimizer.args.lr=0.03")]
    command = ("run", "jobs/mnist.toml", "--run-id=changed", *changed)
    second = project.start(*command, "--accept-drift", run_id="changed")
    second.wait_for_step(begins_at + 3)
    os.kill(second.pid_of(1), signal.SIGKILL)
    second.wait_for_step(begins_at + 3, generation=old + 1)
    interrupt(second)

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
