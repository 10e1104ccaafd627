"""A job whose data can only be read in order, launched, drained and resumed at another size."""

from __future__ import annotations

import os
import signal
from array import array

from tests.end_to_end.harness import Project, named, tensors

JOB = """
[job]
name = "lines"

[model]
entry = "rows:Counter"
step = "rows:step"

[optimizer]
entry = "torch.optim:SGD"
args = { lr = 8.0 }

[dataset]
entry = "rows:rows"
shards = 4
global_batch_size = 8
num_workers = 1

[train]
epochs = 3

[nodes]
nproc_per_node = 2

[snapshots]
every = "5 steps"
"""

ROWS = '''
import random
import time
from pathlib import Path

import torch
from torch import nn

LENGTHS = [34, 26, 14, 22]


def rows(shard, shards):
    assert shards == 4
    numbers = list(range(sum(LENGTHS[:shard]), sum(LENGTHS[: shard + 1])))
    random.shuffle(numbers)
    for number in numbers:
        if not Path("hurry").exists():
            time.sleep(0.05)
        yield number


class Counter(nn.Module):
    """Its weight grows by one for each time a sample is seen."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(sum(LENGTHS)))


def step(model, batch):
    return -model.seen[batch].sum(), len(batch)
'''


def test_every_sample_once_through_drain_and_resize(project: Project) -> None:
    """Two workers drained in the midst of an epoch, three to the end: every line of every epoch, once."""
    project.write("jobs/lines.toml", JOB)
    project.write("rows.py", ROWS)
    first = project.run("jobs/lines.toml", "lines", job="lines")
    first.wait_for_step(6)
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end() == 75, first.told()
    assert "train: 4 data shards of rows, fingerprint" in first.told()
    project.write("hurry", "")
    second = project.start("resume", "lines", "--set=nodes.nproc_per_node=3", run_id="lines", job="lines")
    assert second.end() == 0, second.told()
    (finished,) = named(second.events(), "training.finished")
    assert finished["samples"] == 3 * 96
    seen = array("f", tensors(second.run)["model/seen"])
    assert list(seen) == [3.0] * 96
