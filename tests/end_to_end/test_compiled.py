"""A compiled job that is killed and resumed: it compiles once, and its bits are the same."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from tests.end_to_end.harness import named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

_CODE = """
import time

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Noise:
    fingerprint = "64 points"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.005)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(3, generator=generator)
"""
_JOB = """
[job]
name = "compiled"
seed = 3
[model]
entry = "net:Net"
loss = "torch.nn.functional:mse_loss"
[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 1e-2 }
[dataset]
entry = "net:Noise"
global_batch_size = 16
[train]
steps = 100000
consistency = "exact"
virtual_shards = 2
compile = true
[nodes]
nproc_per_node = 2
[snapshots]
every = "50 steps"
memory = "off"
"""
# Else each worker starts processes to compile in, which import torch as well, and each launch builds a library for each kind of
# vector instructions, to see whether it can: half of this test's CPU.
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.mark.nightly
def test_a_compiled_job_compiles_once(project: Project) -> None:
    """Not after a kill, nor in another launch of one worker on a machine that has nothing.

    Steps done again have the bits of before.
    """
    project.write("net.py", _CODE)
    project.write("jobs/compiled.toml", _JOB)
    running = project.run("jobs/compiled.toml", "compiled-1", job="compiled", **_ALONE)
    (first,) = _compiled(running, 1)
    # One of the node's workers compiles a graph, and the other one, which may be rank 0, finds it then.
    graphs = first["compiled"] + first["from_cache"]
    assert graphs > 0
    (saved,) = running.wait_for("a saved cache", lambda: named(running.events(), events.COMPILER_CACHE))
    assert ("n0", "saved") == (saved["node"], saved["action"])

    done = max(r["step"] for r in read_lines(running.run.metrics))
    last = done - done % 50 + 60  # ten steps after a snapshot
    running.wait_for_step(last)
    os.kill(running.pid_of(1), signal.SIGKILL)
    second = _compiled(running, 2)[-1]
    assert (graphs, 0) == (second["from_cache"], second["compiled"])
    running.wait_for_step(last + 20, 1)
    losses_again = {r["step"]: r["loss"] for r in read_lines(running.run.metrics_redone) if "loss" in r}
    losses = {r["step"]: r["loss"] for r in read_lines(running.run.metrics) if "loss" in r}
    assert set(range(last - 9, last + 1)) <= set(losses_again)
    assert {step: losses[step] for step in losses_again} == losses_again

    running.process.send_signal(signal.SIGTERM)
    running.end()
    shutil.rmtree(running.run.compiler_cache)
    one = "--set=nodes.nproc_per_node=1"
    resumed = project.start("resume", "compiled-1", one, run_id="compiled-1", job="compiled", **_ALONE)
    third = _compiled(resumed, 3)[-1]
    assert (graphs, 0) == (third["from_cache"], third["compiled"])
    loaded = named(resumed.events(), events.COMPILER_CACHE)[-1]
    assert ("loaded", saved["files"]) == (loaded["action"], loaded["files"])

    told = project.start("status", "compiled-1", run_id="compiled-1", job="compiled")
    assert told.end() == 0
    assert f"s in generation 3, {third['from_cache']} graph" in " ".join(told.output.read_text().split())
    resumed.process.send_signal(signal.SIGTERM)
    resumed.end()
    assert [] == named(resumed.events(), events.COMPILER_CACHE_FAILED)


def _compiled(running: Running, generation: int) -> list[dict[str, Any]]:
    """Return what compiling took, once *generation* has."""

    def found() -> list[dict[str, Any]]:
        happened = named(running.events(), events.TRAINING_COMPILED)
        return happened if happened and happened[-1]["generation"] >= generation else []

    return list(running.wait_for("a compiled step", found, 300))
