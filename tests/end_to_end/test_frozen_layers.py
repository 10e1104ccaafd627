"""A head on a frozen backbone: it is stored once, and restored like everything else; the job itself says when it is done."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.harness import named, read_lines, steps_of, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

MODULE = '''"""A backbone that takes no gradient, a head that does, and a loss that may be low enough."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elasticflow import StopTraining


def loss(outputs, targets):
    if torch.is_grad_enabled():
        time.sleep(0.02)
        if Path("enough").exists() and os.environ["RANK"] == "1":
            raise StopTraining("the loss is low enough")
    return cross_entropy(outputs, targets)


def tuned(width):
    wide, narrow = 64 * width, 8 * width
    layers = nn.Flatten(), nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU()
    backbone = nn.Sequential(*layers)
    backbone.requires_grad_(False)
    return nn.Sequential(backbone, nn.BatchNorm1d(narrow), nn.Dropout(0.1), nn.Linear(narrow, 10))
'''
JOB = """extends = "mnist.toml"

[model]
entry = "tuned:tuned"
loss = "tuned:loss"

[train]
epochs = 1000

[evaluation]
every = "1920 samples"

[snapshots]
every = "1920 samples"
keep = { last = 2, best = 1 }
"""


def test_frozen_backbone_is_stored_once_and_survives_a_kill_until_a_rank_has_enough(project: Project) -> None:
    """Snapshots after the first hold the rest alone; after kill -9 the steps done again are the same to the bit.

    StopTraining from rank 1 ends training for all, with its snapshot; resume has nothing to do; everybody says who and why.
    """
    project.write("tuned.py", MODULE)
    project.write("jobs/tuned.toml", JOB)
    running = project.run("jobs/tuned.toml", "tuned", "snapshots.memory=off")
    running.wait_for_step(65)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_step(80, generation=1)
    project.write("enough", "")
    assert running.end() == 0, running.told()

    happened = running.events()
    first, *later = named(happened, events.SNAPSHOT_COMMITTED)
    assert {"samples"} == {each["trigger"] for each in (first, *later[:-1])}
    assert first["step"] == 30
    assert first["bytes"] > 2_000_000
    assert later
    assert all(each["bytes"] < 200_000 for each in later), later
    catalog = Catalog(Storage(str(running.run.path)))
    for found in catalog.committed():
        assert verify.verify(catalog, found) == []
        assert {first["name"]} == (set(found.borrowed_from) or {found.name})
    assert tensors(running.run)["model/0.1.weight"]

    again = named(happened, events.TRAINING_STARTED)[1]
    assert again["step"] >= 30
    done = {line["step"]: line["loss"] for line in read_lines(running.run.metrics) if "eval" not in line}
    redone = [line for line in read_lines(running.run.metrics_redone) if "eval" not in line]
    assert redone
    assert [done[line["step"]] for line in redone] == [line["loss"] for line in redone]

    (stopped,) = named(happened, events.TRAINING_STOPPED)
    step = stopped["step"]
    assert (1, "the loss is low enough") == (stopped["by_rank"], stopped["reason"])
    (finished,) = named(happened, events.RUN_FINISHED)
    assert (step, 1, "rank 1: the loss is low enough") == tuple(
        finished[key] for key in ("step", "restarts", "stopped")
    )
    assert (step, "end") == (later[-1]["step"], later[-1]["trigger"])
    assert list(range(1, step + 1)) == steps_of(running.run)
    assert f"after step {step} by rank 1: the loss is low enough" in running.told()
    resumed = project.start("resume", "tuned", run_id="tuned")
    assert resumed.end() == 2
    assert "run tuned is finished" in resumed.told()
    status = project.start("status", "tuned", run_id="tuned")
    assert status.end() == 0
    assert "stopped by  rank 1: the loss is low enough" in status.told()
