"""Devices and memory formats of whole runs: what is refused by name, and bits that do not change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow import events
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import named
from tests.end_to_end.trajectory_jobs import write_jobs

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

without_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")

# Code of a job whose snapshots say that they were taken on a GPU, as long as the variable is set.
_AS_IF_ON_CUDA = """
import os
from elasticflow.runtime.process import environment
describe = environment.describe
if os.environ.get("AS_IF_ON_CUDA"):
    environment.describe = lambda device: {**describe(device), "device": "cuda", "gpu": "NVIDIA H100"}
"""
# Torch's older getters raise from then on, also in the parts of elasticflow that ask them.
_TF32 = '\ntorch.backends.cuda.matmul.fp32_precision = "tf32"\n'
# One channel in and one out lie alike in both formats.
_WIDE = """

def cnn() -> nn.Module:
    first = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 4))
"""


@without_gpu
def test_a_device_that_is_not_there_is_refused_by_name(project: Project) -> None:
    """`nodes.device = "cuda"` never trains on the CPU: the error names node, key and type; nothing was trained."""
    write_jobs(project)
    running = project.run("jobs/plain-mlp.toml", "none", "nodes.device=cuda", job="plain-mlp")
    assert running.end() == 1, running.told()
    assert 'is "cuda", and torch sees no such device' in running.told()
    assert "elasticflow doctor" in running.told()
    assert not named(running.events(), events.TRAINING_STARTED)


@without_gpu
def test_a_run_changes_its_device_type_only_if_asked_to(project: Project) -> None:
    """A snapshot of a GPU: the CPU does not go on with it unasked; `--set nodes.device=cpu` does, and status names the type.

    The job's module sets TF32 by torch's current interface.
    """
    write_jobs(project)
    module = project.root / "trajectory_models.py"
    module.write_text(module.read_text() + _AS_IF_ON_CUDA + _TF32)
    sets = ("nodes.nproc_per_node=1", "model.flops_per_sample=1e6", "logging.peak_flops=1e12")
    pause = {"TRAJECTORY_PAUSE_S": "0.1"}  # a quick machine takes all steps within one look at them
    series = Series(project, "moved", *sets, job="plain-mlp", AS_IF_ON_CUDA="1", **pause)
    series.reach(14)
    series.kill("everything")

    series = Series(project, "moved", *sets, job="plain-mlp")
    assert series.running.end() == 1, series.running.told()
    text = 'the snapshot was taken on a device of type "cuda", and this worker would train on "cpu"'
    assert text in series.running.told()

    asked = (*sets, "nodes.device=cpu")
    series = Series(project, "moved", *asked, job="plain-mlp", options=("--accept-drift",))
    assert series.running.end() == 0, series.running.told()
    assert series.named(events.TRAINING_STARTED)[-1]["restored_from"] is not None
    status = project.start("status", "moved", "--format=json", run_id="status")
    assert status.end() == 0
    assert json.loads(status.told())["device"] == "cpu"


@pytest.mark.parametrize("job", ["cnn", pytest.param("plain-cnn", marks=pytest.mark.nightly)])
def test_channels_last_survives_a_kill_to_the_bit(project: Project, job: str) -> None:
    """Losses, weights and the optimizer's state; in exact mode at another number of workers, too."""
    write_jobs(project)
    module = project.root / "trajectory_models.py"
    module.write_text(module.read_text() + _WIDE)
    sets, outcome = ("train.channels_last=true", "train.tf32=true"), Outcome("", "")
    alone = Series(project, "alone", *sets, job=job)
    expected = alone.finish(None, outcome)
    formats = {manifest.memory_formats.get("model/3.weight") for manifest in alone.catalog.committed()}
    assert formats == {"channels_last"}

    again = ("nodes.nproc_per_node=1",) if job == "cnn" else ()
    series = Series(project, "killed", *sets, job=job, TRAJECTORY_PAUSE_S="0.02")
    series.reach(14)
    series.kill("worker 1")
    series.trains(1)
    series.kill("everything")
    series.resume(*(f"--set={text}" for text in again), "--accept-drift")
    series.finish(expected, outcome)
    assert [] == outcome.problems
