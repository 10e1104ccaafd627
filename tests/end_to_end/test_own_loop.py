"""A script with a loop of its own on `elasticflow.join`, run by a job file: killed, drained, resized, and the same bits at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.system import fault_injection
from tests.end_to_end.harness import named, steps_of, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

SCRIPT = """
import torch
from torch.nn.functional import cross_entropy
import elasticflow as ef
from examples.mnist import Net, digits

run = ef.join(virtual_shards=4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.keep(model=model, optimizer=optimizer)

def loss_of(part):
    return {"loss": cross_entropy(model(part.inputs), part.targets), "rows": len(part.inputs)}

for batch in run.batches(digits(split="train"), size=64, steps=60):
    optimizer.zero_grad()
    loss = run.gradients(loss_of, batch)
    optimizer.step()
    run.step(loss=loss)
if run.is_finished and run.rank == 0:
    print("all is done", flush=True)
run.finish()
"""
JOB = """
[job]
name = "loop"
seed = 5
[script]
entry = "loop.py"
[nodes]
nproc_per_node = 2
[snapshots]
every = "10 steps"
"""


def test_an_own_loop_is_killed_drained_and_resized(project: Project) -> None:
    """The job file's seed and snapshots are the script's; on one worker in the end; no step is missing or told twice."""
    project.write("loop.py", SCRIPT)
    project.write("loop.toml", JOB)
    alone = project.run("loop.toml", "alone", "nodes.nproc_per_node=1", job="loop")
    faults = "training.step=kill@14 rank=1 generation=1, training.step=stop@8 rank=0 generation=2"
    run = project.run("loop.toml", "disturbed", job="loop", **{fault_injection.VARIABLE: faults})
    run.leave_from_halt(0, generation=2)
    assert alone.end() == 0, alone.told()
    last = project.start(
        "resume", "disturbed", "--set=nodes.nproc_per_node=1", run_id="disturbed", job="loop"
    )
    assert last.end() == 0, last.told()

    told = last.events()
    assert [event["class"] for event in named(told, events.GENERATION_ENDED)][:2] == ["crash", "drained"]
    [failed] = named(told, events.WORKER_FAILED)
    assert failed["rank"] == 1
    assert steps_of(last.run) == steps_of(alone.run) == list(range(1, 61))
    assert named(told, events.SNAPSHOT_COMMITTED)[0]["trigger"] == "steps"
    assert "all is done" in (last.run.rank_log(3, 0, "stdout")).read_text()
    expected, got = tensors(alone.run), tensors(last.run)
    assert expected.keys() == got.keys()
    assert [key for key in expected if expected[key] != got[key]] == []


@pytest.mark.campaign
def test_chaos_and_verify_elastic_try_a_script(project: Project) -> None:
    """Its loop says that it adds up shards: every bit is compared, and nothing lands in the project."""
    project.write("loop.py", SCRIPT)
    project.write("loop.toml", JOB)
    for command in (["verify", "--worlds=1,2"], ["verify", "--faults=3"]):
        tried = project.start(command[0], "loop.toml", *command[1:], "--steps=30", run_id="tried", job="loop")
        assert tried.end() == 0, tried.told()
        assert "bit for bit, after each of 30 steps" in tried.output.read_text()
    assert not (project.root / "runs").exists()


BY_DDP = """
import torch
from torch.nn.parallel import DistributedDataParallel
import elasticflow as ef
from examples.mnist import Net, digits

run = ef.join()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.keep(model=model, optimizer=optimizer)
replicas = DistributedDataParallel(model)
for batch in run.batches(digits(split="train"), size=64, steps=60):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(replicas(batch.inputs), batch.targets)
    (loss * batch.share).backward()
    optimizer.step()
    run.step(loss=loss)
run.finish()
"""


@pytest.mark.nightly
def test_chaos_tries_a_script_whose_gradients_ddp_exchanges(project: Project) -> None:
    """Only rank 0 records, but all ranks tell each other of the same steps."""
    project.write("loop.py", BY_DDP)
    project.write("loop.toml", JOB)
    project.write("plan.toml", '[[faults]]\nstep = 5\nwhat = "kill"\n')
    asked = ("verify", "loop.toml", "--faults=plan.toml", "--steps=9")
    tried = project.start(*asked, run_id="tried", job="loop")
    assert tried.end() == 0, tried.told()
    assert "same: every sample once in 9 steps" in tried.output.read_text()
