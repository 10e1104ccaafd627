"""The main job on a CUDA device: nccl, device chosen by itself, drained and resumed to the same bits."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from elasticflow import events
from tests.end_to_end.harness import Project, named, read_lines, steps_of, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_main_job_trains_on_the_device(project: Project, precision: str) -> None:
    """One worker on one GPU reaches the accuracy of the CPU run at every precision."""
    sets = ("nodes.nproc_per_node=1", f"train.precision={precision}")
    running = project.run("jobs/mnist.toml", precision, *sets)

    assert running.end() == 0, running.told()
    assert named(running.events(), events.TRAINING_STARTED)[0]["device"].startswith("cuda")
    accuracy = [line["eval"]["accuracy"] for line in read_lines(running.run.metrics) if "eval" in line][-1]
    assert accuracy >= 0.97


def test_standby_with_a_context_takes_the_place_of_a_killed_worker(project: Project) -> None:
    """It is told of before the kill; the run ends with the bits of one that was left alone, exact as it is."""
    sets = ("nodes.nproc_per_node=1", "train.consistency=exact", "train.epochs=6")
    undisturbed = project.run("jobs/mnist.toml", "undisturbed", *sets)
    assert undisturbed.end() == 0, undisturbed.told()
    running = project.run("jobs/mnist.toml", "killed", *sets)
    running.wait_for("a standby", lambda: named(running.events(), events.STANDBYS_READY))
    standby = named(running.events(), events.STANDBYS_READY)[0]["pids"][0]
    os.kill(running.pid_of(0), signal.SIGKILL)
    running.wait_for_group(1, 1)
    assert standby == running.pid_of(0)
    assert running.end() == 0, running.told()
    assert tensors(undisturbed.run) == tensors(running.run)


def test_drained_run_goes_on_from_the_same_step(project: Project) -> None:
    """SIGTERM, then resume: all steps once, and the same tensors by name and size as a run left alone."""
    sets = ("nodes.nproc_per_node=1",)
    undisturbed = project.run("jobs/mnist.toml", "undisturbed", *sets)
    assert undisturbed.end() == 0, undisturbed.told()
    drained = project.run("jobs/mnist.toml", "drained", *sets)
    drained.wait_for_step(30)
    os.kill(drained.process.pid, signal.SIGTERM)
    assert drained.end(30) == 75, drained.told()
    resumed = project.start("resume", "drained", run_id="drained")
    assert resumed.end() == 0, resumed.told()

    assert steps_of(undisturbed.run) == steps_of(resumed.run)
    sizes = {key: len(data) for key, data in tensors(undisturbed.run).items()}
    assert sizes == {key: len(data) for key, data in tensors(resumed.run).items()}
