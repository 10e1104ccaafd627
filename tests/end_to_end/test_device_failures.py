"""Runs whose device fails, and whose NCCL aborts survivors: no device is here, so the job's code does as they would."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, steps_of
from tests.launcher.restarts.test_failures import REMOTE, aborted

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

STEPS, EVERY = 24, 10
FAILING = '''
"""A training step that fails as on a device: at step 12, and at step 12 again after the restart."""

import ctypes
import os
import sys
import time
from pathlib import Path

import torch

import obedient

PIECES = 2  # of a step: 4 virtual shards on two ranks
RANK, GENERATION = os.environ.get("RANK"), int(os.environ.get("ELASTICFLOW_GENERATION", "0"))
FAILS_AT = {1: 12, 2: 2, 3: 2}.get(GENERATION)  # later generations begin at step 10
calls = 0


def has_ended(pid):
    """Return whether the process whose number the file *pid* holds is gone, or waits for its parent."""
    try:
        state = Path(f"/proc/{pid.read_text()}/stat").read_text()
    except FileNotFoundError:
        return pid.exists()
    return state.rpartition(")")[2].split()[0] == "Z"


def step(model, batch):
    """Return the loss of a piece."""
    global calls
    calls += 1
    if FAILS_AT is not None and calls == PIECES * FAILS_AT:
        if GENERATION == 3:
            if RANK == "1":  # a survivor, whose NCCL aborts it before the other's end is seen
                sys.stderr.write(Path("aborted.txt").read_text())
                sys.stderr.flush()
                Path("aborts.txt").write_text(str(os.getpid()))
                os.abort()
            while not has_ended(Path("aborts.txt")):
                time.sleep(0.001)
            time.sleep(0.05)  # the agent sees that end first, and waits for the other for a moment
            ctypes.string_at(0)
        elif RANK == "1":
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\\nFor debugging ...")
    return obedient.step(model, batch)
'''


def test_a_device_that_fails_twice_at_one_step_and_an_abort_of_nccl_cost_restarts_alone(
    project: Project,
) -> None:
    """Neither is final, no snapshot is blamed, and a rank that NCCL aborted is not taken for the one that crashed."""
    tiny_job.write(project, STEPS, EVERY, budget=10)
    tiny_job.hurry(project)
    project.write("failing.py", FAILING)
    project.write("aborted.txt", aborted(REMOTE))
    job = project.root / "jobs" / "tiny.toml"
    job.write_text(job.read_text().replace("obedient:step", "failing:step"))

    running = project.run("jobs/tiny.toml", "devices", job="tiny")
    assert 0 == running.end(), running.told()

    happened = running.events()
    failed = [(e["rank"], e["class"], e["exit_code"]) for e in named(happened, events.WORKER_FAILED)]
    assert [(1, "device", 1), (1, "device", 1), (0, "crash", -11)] == failed
    assert "1 other rank: connection closed by peer" == named(happened, events.WORKER_FAILED)[2]["others"]
    assert ["device", "device", "crash"] == [e["class"] for e in named(happened, events.BUDGET_CHARGED)]
    assert [] == named(happened, events.SNAPSHOT_REJECTED)
    assert [0, 10, 10, 10] == [e["step"] for e in named(happened, events.TRAINING_STARTED)]
    assert list(range(1, STEPS + 1)) == steps_of(running.run)


NVIDIA_SMI = """#!/bin/sh
# A driver that knows of a row it could not remap, on the machine that plays node n1.
[ "$ELASTICFLOW_NODE" = n1 ] || exit 6
case "$1" in
--query-gpu=*) echo "GPU-bad, 00000000:3B:00.0, 1, No" ;;
--query-remapped-rows=*) echo "GPU-bad, No, Yes" ;;
esac
"""
SICK = '''
"""A training step that fails on node n1, as long as that takes part."""

import os

import torch

import obedient


def step(model, batch):
    """Return the loss of a piece, unless the device is sick."""
    if os.environ.get("ELASTICFLOW_NODE") == "n1":
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    return obedient.step(model, batch)
'''


def test_node_whose_device_fails_its_check_is_left_out(project: Project) -> None:
    """Two agents on one machine, `nvidia-smi` pretended: the failure comes first, then the check, then n0 trains alone.

    The check runs as it is, with torch: it finds no device to compute on here, and tells what the pretended driver knows.
    """
    tiny_job.write(project, STEPS, EVERY, budget=10)
    tiny_job.hurry(project)
    project.write("sick.py", SICK)
    project.write("bin/nvidia-smi", NVIDIA_SMI).chmod(0o755)
    job = project.root / "jobs" / "tiny.toml"
    job.write_text(job.read_text().replace("obedient:step", "sick:step"))

    options = ("--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1")
    path = f"{project.root / 'bin'}:{os.environ['PATH']}"
    running = project.start(
        "run", "jobs/tiny.toml", "--run-id=sick", *options, run_id="sick", job="tiny", PATH=path
    )
    assert 0 == running.end(), running.told()

    happened = running.events()
    assert [("n1", "device")] == [(e["node"], e["class"]) for e in named(happened, events.WORKER_FAILED)]
    fault = "GPU-bad: a row of its memory could not be remapped: it has to be replaced"
    [checked] = named(happened, events.DEVICES_CHECKED)
    assert ("n1", [fault]) == (checked["node"], checked["faults"])
    assert ["GPU-bad: 1 uncorrected ECC errors since its last reset"] == checked["notes"]
    assert [("n1", fault)] == [(e["node"], e["reason"]) for e in named(happened, events.NODE_EXCLUDED)]
    assert [2, 1] == [e["nodes"] for e in named(happened, events.GENERATION_STARTED)]
    assert list(range(1, STEPS + 1)) == steps_of(running.run)


UNFIT = '''
"""A training step of two nodes: n0 crashes once, and then n1 has come back with fewer devices."""

import ctypes
import os
from pathlib import Path

import obedient
from elasticflow.errors import DeviceError

CRASHED = Path(__file__).with_name("crashed")
calls = 0


def step(model, batch):
    """Return the loss of a piece."""
    global calls
    calls += 1
    if calls == 1 and os.environ.get("ELASTICFLOW_NODE") == "n1" and CRASHED.exists():
        raise DeviceError("node n1: 8 workers, and torch sees 7 devices of type \\"cuda\\"")
    if os.environ.get("RANK") == "0" and calls == 24 and not CRASHED.exists():
        CRASHED.touch()
        ctypes.string_at(0)
    return obedient.step(model, batch)
'''


@pytest.mark.nightly  # the test above has a node left out
def test_node_that_comes_back_with_too_few_devices_is_left_out(project: Project) -> None:
    """The other one trains to the end; the refusal costs nothing of the budget."""
    tiny_job.write(project, STEPS, EVERY, budget=1)
    tiny_job.hurry(project)
    project.write("unfit.py", UNFIT)
    job = project.root / "jobs" / "tiny.toml"
    job.write_text(job.read_text().replace("obedient:step", "unfit:step"))

    options = ("--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1")
    running = project.start("run", "jobs/tiny.toml", "--run-id=unfit", *options, run_id="unfit", job="tiny")
    assert 0 == running.end(), running.told()

    happened = running.events()
    reason = 'node n1: 8 workers, and torch sees 7 devices of type "cuda"'
    assert [("n1", reason)] == [(e["node"], e["reason"]) for e in named(happened, events.NODE_EXCLUDED)]
    assert [2, 2, 1] == [e["nodes"] for e in named(happened, events.GENERATION_STARTED)]
    assert list(range(1, STEPS + 1)) == steps_of(running.run)
