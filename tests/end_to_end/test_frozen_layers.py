"""A job that trains a head on a frozen backbone: the backbone is stored once, and restored like everything else."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.snapshots import reader
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage
from tests.end_to_end.harness import named, read_lines, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

MODULE = '''"""A backbone that takes no gradient, and a head that does."""

from torch import nn


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

[train]
epochs = 6

[snapshots]
every = "1920 samples"
keep = { last = 2, best = 1 }
"""


def test_frozen_backbone_is_stored_once_and_survives_a_kill(project: Project) -> None:
    """Snapshots after the first hold the rest alone; after kill -9 the steps done again are the same to the bit."""
    project.write("tuned.py", MODULE)
    project.write("jobs/tuned.toml", JOB)
    running = project.run("jobs/tuned.toml", "tuned")
    running.wait_for_step(65)
    os.kill(running.pid_of(1), signal.SIGKILL)
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
        assert reader.verify(catalog, found) == []
        assert {first["name"]} == (set(found.lenders) or {found.name})
    assert tensors(running.run)["model/0.1.weight"]

    again = named(happened, events.TRAINING_STARTED)[1]
    assert again["step"] >= 30
    done = {line["step"]: line["loss"] for line in read_lines(running.run.metrics) if "eval" not in line}
    redone = [line for line in read_lines(running.run.metrics_redone) if "eval" not in line]
    assert redone
    assert [done[line["step"]] for line in redone] == [line["loss"] for line in redone]
