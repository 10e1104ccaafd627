"""A job whose data set has a pool, and whose code leaves a child behind: nothing hangs, and only that child is told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.system import fault_injection
from tests.end_to_end.harness import named, steps_of, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

CODE = """
import multiprocessing, os, threading, time
import torch


class Numbers:
    def __init__(self):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            self.values = pool.map(float, range(64))
        threading.Thread(target=leave_behind).start()  # the kernel ends a child with the thread that forked it

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([self.values[index]]), torch.zeros(1)


def leave_behind():
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)


def step(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)
"""
JOB = """
[job]
name = "pooled"
[model]
entry = "torch.nn:Linear"
args = { in_features = 1, out_features = 1 }
step = "pooled:step"
[optimizer]
entry = "torch.optim:SGD"
args = { lr = 1e-6 }
[dataset]
entry = "pooled:Numbers"
global_batch_size = 8
num_workers = 1
[train]
steps = 20
[snapshots]
every = "2 steps"
[nodes]
nproc_per_node = 2
"""


def test_a_pool_in_a_data_set_ends_and_only_the_job_s_processes_are_told_of(project: Project) -> None:
    """A worker is killed, then an agent with all its helpers: loaders, fork server and writer end without a word."""
    project.write("pooled.py", CODE)
    project.write("pooled.toml", JOB)
    faults = "training.step=kill@4 rank=1 generation=1, training.step=stop@4 rank=0 generation=2"
    run = project.run("pooled.toml", "run", job="pooled", **{fault_injection.VARIABLE: faults})
    above = run.halted(0, generation=2).parents()
    next(process for process in above if "elasticflow.launcher.agent.main" in process.cmdline()).kill()
    assert run.end() == 0, run.told()

    assert steps_of(run.run) == list(range(1, 21))
    commands = {event["command"] for event in named(run.events(), events.PROCESS_LEFT_BEHIND)}
    assert commands == {"worker-child, forked by a worker"}
    assert [] == wait_gone("run")
