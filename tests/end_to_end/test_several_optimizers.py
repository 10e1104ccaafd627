"""A GAN with two optimizers that its own step moves, and an object of its own: killed, drained, resumed, nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.read import load
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection
from tests.end_to_end.by_hand import undisturbed
from tests.end_to_end.harness import named, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running
    from tests.forked import ForkedPrograms

GAN = """
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.d = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 8)), nn.ReLU(), nn.Linear(8, 1))


def points():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, generator=generator) for _ in range(100)]


def optimizers(model, lr):
    return {"g": Adam(model.g.parameters(), lr=lr), "d": Adam(model.d.parameters(), lr=2 * lr)}


def schedules(optimizers, gamma):
    return {name: ExponentialLR(each, gamma) for name, each in optimizers.items()}


class Curriculum:
    # How often a batch was trained on, and when last.
    def __init__(self):
        self.seen, self.trace = 0, torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen, "trace": self.trace}

    def load_state_dict(self, state):
        self.seen, self.trace = state["seen"], state["trace"]


curriculum = Curriculum()


def step(model, batch, optimizers):
    curriculum.seen += 1
    curriculum.trace[curriculum.seen % 3] = curriculum.seen
    fake, ones = model.g(torch.randn(len(batch), 4)), torch.ones(len(batch), 1)
    optimizers["d"].zero_grad()
    loss_d = bce(model.d(batch), ones) + bce(model.d(fake.detach()), 0 * ones)
    loss_d.backward()
    optimizers["d"].step()
    optimizers["g"].zero_grad()
    loss_g = bce(model.d(fake), ones)
    loss_g.backward()
    optimizers["g"].step()
    return {"loss": loss_d + loss_g}


def spread(model, batch):
    return model.g(torch.randn(len(batch), 4)).std()


class Both(Optimizer):  # as it was written before: with no state_dict of its own
    def __init__(self, model, lr):
        super().__init__(model.parameters(), {"lr": lr})
        self.gen_adam, self.dis_adam = Adam(model.g.parameters(), lr=lr), Adam(model.d.parameters(), lr=lr)

    def step(self, closure=None):
        self.gen_adam.step()
        self.dis_adam.step()


def plain_step(model, batch):
    return model.d(model.g(torch.randn(len(batch), 4))).mean() + model.d(batch).mean()

"""

JOB = """
[job]
name = "gan"

[model]
entry = "gan:Gan"
step = "gan:step"

[optimizer]
entry = "gan:optimizers"
args = { lr = 0.01 }

[lr_scheduler]
entry = "gan:schedules"
args = { gamma = 0.99 }

[dataset]
entry = "gan:points"
global_batch_size = 7

[evaluation]
entry = "gan:points"
metrics = { spread = "gan:spread" }

[train]
steps = 70

[nodes]
nproc_per_node = 2

[snapshots]
every = "10 steps"
include = { curriculum = "gan:curriculum" }
"""
STEPS = 70
# Rank 1 is killed after 13 steps; rank 0 of the next generation halts after 14, so that the launch can be asked to leave.
FAULTS = "training.step=kill@13 rank=1 generation=1, training.step=stop@14 rank=0 generation=2"


def included(running: Running) -> tuple[int, dict[str, Any], list[float]]:
    """Return step, state and tensor of the job's own object in the newest snapshot."""
    catalog = Catalog(Storage(str(running.run.path)))
    newest = catalog.newest()
    assert newest is not None
    found = load.load(catalog, newest.name)
    key = "include.curriculum/trace"
    data = memoryview(bytearray(newest.tensors[key].nbytes))
    found.read_into(key, data)
    return newest.step, found.state["state"]["include.curriculum"], list(data.cast("f"))


def test_both_optimizers_and_an_included_object_survive_a_kill_and_a_drain(
    project: Project, forked: ForkedPrograms
) -> None:
    """Weights, moments and learning rates are bit for bit those of the run that nobody disturbed.

    The object, which counts steps, has counted each of them once.
    """
    project.write("gan.py", GAN)
    job_file = project.write("gan.toml", JOB)
    disturbed = project.run("gan.toml", "disturbed", job="gan", **{fault_injection.VARIABLE: FAULTS})
    disturbed.leave_from_halt(0, generation=2)
    left_at, state, _ = included(disturbed)
    assert state["seen"] == left_at < STEPS
    resumed = project.start("resume", "disturbed", run_id="disturbed", job="gan")
    assert resumed.end() == 0, resumed.told()

    assert len(named(disturbed.events(), "worker.failed")) == 1
    expected, found = undisturbed(job_file, forked, workers=2), tensors(resumed.run)
    assert {key.partition("/")[0] for key in found} == {
        "model",
        "optimizer.g",
        "optimizer.d",
        "include.curriculum",
    }
    assert found == expected
    end, state, trace = included(resumed)
    assert (STEPS, STEPS) == (end, state["seen"])
    assert sorted(trace) == [STEPS - 2, STEPS - 1, STEPS]
    lines = [line for line in resumed.run.metrics.read_text().splitlines() if '"lr": {"g": ' in line]
    assert len(lines) == STEPS
    assert '"loss"' not in next(
        line for line in resumed.run.metrics.read_text().splitlines() if '"eval"' in line
    )


def test_an_optimizer_that_keeps_others_to_itself_ends_the_run_by_name(project: Project) -> None:
    """What was lost without a word is refused after the second step, once, with what to do."""
    project.write("gan.py", GAN)
    project.write("gan.toml", JOB)
    sets = (
        "model.step=gan:plain_step",
        "optimizer.entry=gan:Both",
        "nodes.nproc_per_node=1",
        "lr_scheduler.entry=torch.optim.lr_scheduler:ExponentialLR",
    )
    refused = project.run("gan.toml", "refused", *sets, job="gan")
    assert refused.end() == 1, refused.told()
    # One try: the next would be refused as well.
    (failed,) = named(refused.events(), "worker.failed")
    error = failed["error"]
    assert "optimizer.gen_adam.state['g.0.weight']['step'] (and " in error
    assert "no snapshot holds it: a restart would lose it" in error
    assert "return them in a dict, for a step(model, batch, optimizers)" in refused.told()
