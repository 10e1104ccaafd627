"""A rank that makes the others wait is named, with real processes; a run without one names nobody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import named

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

CODE = '''
import os, time
import torch
from torch import nn

SLOW, PAUSE = os.environ.get("SLOW", ""), 0.02

def slow(place):
    """Rank 1 takes four times as long, where SLOW says."""
    time.sleep(PAUSE * (4 if os.environ.get("RANK") == "1" and place == SLOW else 1))

class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index % 4 == 0:
            slow("data")
        return torch.full((4,), float(index)), torch.tensor([float(index % 3)])

def model():
    return nn.Linear(4, 1)

def step(model, batch):
    inputs, targets = batch
    slow("compute")
    return nn.functional.mse_loss(model(inputs) / 100, targets)
'''
JOB = """
[job]
name = "slow"
[model]
entry = "rows:model"
step = "rows:step"
[dataset]
entry = "rows:Rows"
global_batch_size = 8
{workers}
[optimizer]
entry = "torch.optim:SGD"
args = {{ lr = 0.001 }}
[train]
steps = {steps}
{train}
[snapshots]
every = "1000 steps"
[nodes]
nproc_per_node = 2
"""


def start(
    project: Project, run_id: str, *, slow: str, train: str = "", workers: str = "", steps: int = 2000
) -> Running:
    """Start a run with two workers, one of which is slow where *slow* says."""
    project.write("rows.py", CODE)
    project.write("jobs/slow.toml", JOB.format(train=train, workers=workers, steps=steps))
    return project.run("jobs/slow.toml", run_id, job="slow", SLOW=slow, OMP_NUM_THREADS="1")


def said(project: Project, *arguments: str) -> str:
    """Return the output of a command."""
    done = project.call(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("slow", "train", "workers"),
    [
        ("compute", "", ""),
        pytest.param("data", "", "num_workers = 1", marks=pytest.mark.nightly),
        pytest.param("compute", 'consistency = "exact"\nvirtual_shards = 2', "", marks=pytest.mark.nightly),
    ],
    ids=["compute", "loader process", "exact"],
)
def test_slow_rank_is_named(project: Project, slow: str, train: str, workers: str) -> None:
    """Once, with its node and by how much, in the events and by the commands."""
    running = start(project, "slow", slow=slow, train=train, workers=workers)
    running.wait_for("the slow rank", lambda: named(running.events(), events.RANK_SLOW))
    [told] = named(running.events(), events.RANK_SLOW)
    assert (told["rank"], told["device"]) == (1, "cpu")
    assert told["node"] in {node["node"] for node in named(running.events(), events.NODE_JOINED)}
    assert told["factor"] >= 1.5
    assert told["own_s"] > told["others_s"]
    shown = f"rank 1 ({told['node']}, cpu) takes "
    assert shown in said(project, "status", "slow")
    assert shown in said(project, "why", "slow")
    [note] = json.loads(said(project, "status", "slow", "--format", "json"))["slow_ranks"]
    assert note.startswith(shown)


@pytest.mark.nightly
def test_nobody_is_named_where_none_is_slow(project: Project) -> None:
    """Though the machine has other things to do, and rank 0 has work that the others have not."""
    running = start(project, "even", slow="", workers="num_workers = 1", steps=500)
    assert running.end() == 0, running.told()
    assert named(running.events(), events.RANK_SLOW) == []
