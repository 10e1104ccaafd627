"""The same run at 2, then 1, then 3 workers: every sample of every epoch exactly once."""

from __future__ import annotations

import os
import signal
import struct

from tests.end_to_end.harness import Project, steps_of, tensors

SAMPLES, EPOCHS, BATCH = 240, 4, 24

CODE = f'''
"""A model whose one parameter counts how often each sample was seen."""
import time

import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros({SAMPLES}))


class Samples:
    fingerprint = "the numbers below {SAMPLES}"

    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor(index)


def step(model, batch):
    """Plain SGD with rate 1 adds 1 to the count of each sample: the gradient of the mean is -1/{BATCH} for each."""
    return -model.counts[batch].mean() * {BATCH}
'''

JOB = f"""
[job]
name = "counting"

[model]
entry = "counting:Counter"
step = "counting:step"

[optimizer]
entry = "torch.optim:SGD"
args = {{ lr = 1.0 }}

[dataset]
entry = "counting:Samples"
global_batch_size = {BATCH}
micro_batch_size = 5

[train]
epochs = {EPOCHS}

[nodes]
nproc_per_node = 2

[snapshots]
every = "7 steps"
"""


def test_resume_at_other_world_sizes_sees_every_sample_once_per_epoch(project: Project) -> None:
    """2 workers, drained; 1 worker, drained; 3 workers, one killed: each count ends at the number of epochs."""
    project.write("counting.py", CODE)
    project.write("jobs/counting.toml", JOB)
    first = project.run("jobs/counting.toml", "worlds", job="counting")
    first.wait_for_step(5)
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end(30) == 75, first.told()

    second = project.start(
        "resume", "worlds", "--set=nodes.nproc_per_node=1", run_id="worlds", job="counting"
    )
    second.wait_for_step(first.state()["step"] + 4, generation=1)
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.end(30) == 75, second.told()

    third = project.start("resume", "worlds", "--set=nodes.nproc_per_node=3", run_id="worlds", job="counting")
    third.wait_for_step(second.state()["step"] + 3, generation=2)
    os.kill(third.pid_of(2), signal.SIGKILL)
    assert third.end() == 0, third.told()

    [counts] = [data for key, data in tensors(third.run).items() if key.endswith("counts")]
    assert [float(EPOCHS)] * SAMPLES == list(struct.unpack(f"<{SAMPLES}f", counts))
    steps = SAMPLES * EPOCHS // BATCH
    assert list(range(1, steps + 1)) == steps_of(third.run)
