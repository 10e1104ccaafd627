"""`elasticflow verify` on jobs that keep the promise and on one that cannot."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow.protocol import trajectory_record
from tests.end_to_end.harness import Project, processes_of, wait_gone

if TYPE_CHECKING:
    from pathlib import Path

EXACT = ("--set=train.consistency=exact", "--set=train.virtual_shards=4")
BY_RANK = """
import os

import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Points:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def step(model, points):
    noise = torch.Generator().manual_seed(int(os.environ["RANK"]))  # what each rank does for itself
    return (model(points) - torch.randn(len(points), 1, generator=noise)).square().mean()


def plain(model, points):
    return (model(points) - points.sum(1, keepdim=True)).square().mean()
"""
# The same, but for what each rank does for itself, in batch mode.
BATCH = ("--set=model.step=by_rank:plain", "--set=train.consistency=batch", "--set=train.virtual_shards=")
JOB = """
[job]
name = "by-rank"
[model]
entry = "by_rank:net"
step = "by_rank:step"
[optimizer]
entry = "torch.optim:SGD"
args = { lr = 0.1, momentum = 0.9 }
[dataset]
entry = "by_rank:Points"
global_batch_size = 16
[train]
steps = 12
consistency = "exact"
virtual_shards = 4
[snapshots]
uri = "store"
"""


def write_small_job(project: Project) -> None:
    """Put the job that depends on the rank into *project*."""
    project.write("by_rank.py", BY_RANK)
    project.write("jobs/by_rank.toml", JOB)


def kept_runs(folder: Path) -> list[str]:
    """Return the ids of the trials' runs."""
    return sorted(path.name for path in (folder / "runs").glob("*/*"))


def test_an_exact_job_has_the_same_bits_at_each_world_size_and_through_a_kill_and_a_resize(
    project: Project,
) -> None:
    """The answer is yes; steps lost with the worker were done again; the job's own runs and store are untouched."""
    keep = project.root / "kept"
    options = ("--worlds", "2,1", "--steps", "12", *EXACT, "--set=snapshots.uri=store")
    asked = ("verify", "jobs/mnist.toml", *options, "--format", "json", f"--keep={keep}")
    running = project.start(*asked, run_id="none")

    assert running.end() == 0, running.told()
    facts = json.loads(running.output.read_text())
    assert ("mnist", "exact", 12, True) == tuple(
        facts[key] for key in ("job", "consistency", "steps", "same")
    )
    assert [[2], [1], [2, 2], [1, 2]] == [each["worlds"] for each in facts["trials"]]
    assert {"bits"} == {each["compared"] for each in facts["trials"]}
    disturbed = facts["trials"][-1]
    assert (4, 8, 12, None) == (
        disturbed["killed_after"],
        disturbed["drained_after"],
        disturbed["comparison"]["steps"],
        disturbed["comparison"]["difference"],
    )
    assert disturbed["comparison"]["redone"] >= 1
    assert disturbed["comparison"]["values"] > 40
    assert not (project.root / "runs").exists()
    assert not (project.root / "store").exists()
    for name in kept_runs(keep):
        assert [] == wait_gone(name)
        records = trajectory_record.read_records(keep / "records" / name)
        assert list(range(1, 13)) == sorted({r.step for r in records if r.loss is not None})


def test_a_job_that_depends_on_the_rank_is_found_out_and_the_tensor_named(project: Project) -> None:
    """The answer is no: from the first step on, in the first layer."""
    write_small_job(project)
    running = project.start("verify", "jobs/by_rank.toml", "--worlds", "1,2", run_id="none")

    assert running.end() == 1, running.told()
    said = running.output.read_text()
    assert re.search(r"^1 +nothing +12 .* reference$", said, re.MULTILINE)
    assert re.search(
        r"^2 +nothing +12 .* other bits\n +step 1: model/0.weight is \w+, was \w+ in", said, re.MULTILINE
    )
    assert re.search(
        r"^2 -> 1 +kill -9 after step 4, resized after step 8 .* other bits$", said, re.MULTILINE
    )
    assert (
        "different: 2 trials of 3, first at step 1, model/0.weight\nhelp: something depends on the rank"
        in said
    )
    assert re.search(r"^1 -> 1 +kill -9 after step 4, drained after step 8 .* same bits$", said, re.MULTILINE)
    assert not (project.root / "runs").exists()


FORGETFUL = """
from torch.optim import SGD


class Forgetful(SGD):
    norm = 1.0  # as many a hand-made trust ratio

    def step(self, closure=None):
        self.norm = 0.9 * self.norm + 0.1 * float(sum(p.grad.norm() for p in self.param_groups[0]["params"]))
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.norm)
        return super().step(closure)
"""


@pytest.mark.campaign
def test_state_that_is_lost_with_a_worker_shows_in_batch_mode_too(project: Project) -> None:
    """The losses stay within 5 %, which hid it; the bits after the restart do not."""
    project.write("forgetful.py", FORGETFUL)
    write_small_job(project)
    options = (
        *BATCH,
        "--worlds=1",
        "--steps=6",
        "--set=optimizer.entry=forgetful:Forgetful",
        "--set=optimizer.args={lr = 0.1}",
    )
    running = project.start("verify", "jobs/by_rank.toml", *options, run_id="none")

    assert running.end() == 1, running.told()
    said = running.output.read_text()
    assert re.search(r"^1 -> 1 +kill .* other bits\n +step \d+, done again: ", said, re.MULTILINE), said
    assert "help: something that training depends on was lost with the worker" in said


@pytest.mark.campaign
def test_a_batch_job_has_the_same_bits_through_a_kill(project: Project) -> None:
    """At one world size even batch mode promises them."""
    write_small_job(project)
    options = (*BATCH, "--worlds=2", "--steps=6")
    running = project.start("verify", "jobs/by_rank.toml", *options, run_id="none")

    assert running.end() == 0, running.told()
    said = running.output.read_text()
    assert re.search(r"^2 -> 2 +kill .* 6, \d again .* same bits$", said, re.MULTILINE), said
    assert "bit for bit, after each of 6 steps\n" in said


def test_ctrl_c_leaves_no_process_and_no_file(project: Project) -> None:
    """Exit code 130; the scratch folder is gone."""
    scratch = project.root / "scratch"
    scratch.mkdir()
    running = project.start("verify", "jobs/mnist.toml", "--worlds=2", run_id="none", TMPDIR=str(scratch))
    [state] = running.wait_for(
        "workers", lambda: [p for p in scratch.glob("*/runs/*/*/state.json") if '"rank": 1' in p.read_text()]
    )
    assert len(processes_of(state.parent.name, state.parents[3])) > 3

    os.kill(running.process.pid, signal.SIGINT)

    assert running.end() == 130, running.told()
    assert [] == list(scratch.glob("elasticflow-*"))
    assert [] == wait_gone(state.parent.name)
