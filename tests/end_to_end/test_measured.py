"""What is measured is what is kept: the average's metrics, the rates that were used, the time of all launches."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.observe.status import read_status
from elasticflow.system import fault_injection
from elasticflow.system.records import unix_time
from examples.mnist import digits
from tests.end_to_end.harness import named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

OWN = '''
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    """A classifier with BatchNorm, beside a number that each step moves by its learning rate."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        self.moved = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        return self.body(inputs)


def optimizer(model):
    body = {"params": list(model.body.parameters()), "name": "body"}
    return torch.optim.SGD([body, {"params": [model.moved], "name": "moved", "lr": 1.0}], lr=0.05)


def step(model, batch):
    return cross_entropy(model(batch[0]), batch[1]) + model.moved - model.moved.detach()


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def moved(model, batch):
    return model.moved


def far(model, batch):
    return (model.moved + 5) ** 2  # each step takes one away: the best is after five
'''
JOB = """
[job]
name = "measured"
[model]
entry = "own:Net"
step = "own:step"
[optimizer]
entry = "own:optimizer"
[lr_scheduler]
entry = "torch.optim.lr_scheduler:StepLR"
args = { step_size = 1, gamma = 0.95 }
[dataset]
entry = "examples.mnist:digits"
args = { split = "train" }
global_batch_size = 64
[evaluation]
entry = "examples.mnist:digits"
args = { split = "test" }
every = "1 step"
metrics = { accuracy = "own:accuracy", moved = "own:moved" }
best = "max accuracy"
weights = "both"
[train]
steps = 60
ema = 0.8
threads = 1
[nodes]
nproc_per_node = 2
[snapshots]
every = "4 steps"
keep = { last = 1, best = 1 }
"""

OVERFITTED = """
[job]
name = "overfitted"
[model]
entry = "own:Net"
step = "own:step"
[optimizer]
entry = "own:optimizer"
[dataset]
entry = "examples.mnist:digits"
args = { split = "train" }
global_batch_size = 64
[evaluation]
entry = "examples.mnist:digits"
args = { split = "test" }
every = "5 steps"
metrics = { far = "own:far" }
best = "min far"
[train]
steps = 100
stop_when = "far not better for 6 evaluations"
threads = 1
[nodes]
nproc_per_node = 2
[snapshots]
every = "13 steps"
memory = "1 step"
keep = { last = 1, best = 1 }
"""


def by_hand(weights: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a model with these weights over the whole test set, in one batch and without the product."""
    own: dict[str, Any] = {}
    exec(OWN, own)
    net = own["Net"]()
    net.load_state_dict(weights)
    test = digits(split="test")
    batch = [torch.stack([torch.as_tensor(test[i][part]) for i in range(len(test))]) for part in (0, 1)]
    with torch.no_grad():
        net.eval()
        return {
            "loss": float(own["step"](net, batch)),
            "accuracy": float(own["accuracy"](net, batch)),
            "moved": float(net.moved),
        }


def test_what_is_measured_is_what_is_kept(project: Project) -> None:
    """A run over two launches: metrics of the exported average, rates of the steps made, time that adds up."""
    project.write("own.py", OWN)
    project.write("job.toml", JOB)
    sets = {"run_id": "m", "job": "measured"}
    halts = {fault_injection.VARIABLE: "training.step=stop@6 rank=0"}
    first = project.start("run", "job.toml", "--run-id=m", **sets, **halts)
    first.leave_from_halt(0, generation=1)
    second = project.start("run", "job.toml", "--run-id=m", "--scale=1@0s 1@900s", **sets)
    assert second.end() == 0, second.told()

    lines = read_lines(second.run.metrics)
    steps = {line["step"]: line for line in lines if "eval" not in line}
    evaluations = {line["step"]: line for line in lines if "eval" in line}
    assert list(steps) == list(evaluations) == list(range(1, 61))

    # The rate that is logged is how far the step moved a number whose gradient is one.
    places = [0.0, *(line["eval_raw"]["moved"] for line in evaluations.values())]
    moves = [before - after for before, after in pairwise(places)]
    assert [line["lr"]["moved"] for line in steps.values()] == pytest.approx(moves)
    assert [line["lr"]["body"] for line in steps.values()] == pytest.approx([0.05 * move for move in moves])

    # Epochs are counted one way, and the line of an evaluation says so.
    assert [line["in_epoch"] for line in steps.values()] == [
        line["in_epoch"] for line in evaluations.values()
    ]
    assert (steps[22]["in_epoch"], steps[23]["in_epoch"], steps[24]["in_epoch"]) == (1, 1, 2)
    assert "epoch 3, step 60: ema: accuracy " in second.told()

    # The best snapshot is the best average; what is exported of it without being asked has the metrics in the file.
    export = project.start("snapshots", "export", "m", "best", "--format=torch", "--output=best.pt", **sets)
    assert export.end() == 0, export.told()
    (step,) = {int(name) for name in re.findall(r"from 0*(\d+)-", export.told())}
    best = evaluations[step]
    found = by_hand(torch.load(project.root / "best.pt", weights_only=True))
    assert best["weights"] == "ema"
    assert best["eval"] == pytest.approx(found, rel=1e-5)
    assert best["eval"]["moved"] != pytest.approx(best["eval_raw"]["moved"])
    assert best["eval"]["accuracy"] == max(line["eval"]["accuracy"] for line in evaluations.values())
    assert "measured better" not in export.told()

    # Durations add up: of each launch, and of the run over both.
    events = second.events()
    (interrupted,), (finished,) = named(events, "run.interrupted"), named(events, "run.finished")
    for told in (interrupted, finished):
        assert told["seconds"] == pytest.approx(sum(told["durations"].values()))
        assert told["durations"]["evaluating"] > 0
    both = {name: finished["durations"][name] + took for name, took in interrupted["durations"].items()}
    assert finished["run_durations"] == pytest.approx(both, abs=0.5)
    status = read_status(second.run)
    assert status.durations == pytest.approx(finished["run_durations"], abs=0.5)
    assert status.started == unix_time(events[0]["timestamp"])
    assert (status.launched or 0.0) > (status.started or 0.0)

    (scale,) = named(events, "scale.not_reached")
    assert scale["changes"] == ["1@900s"]


def test_a_new_best_value_has_a_snapshot_where_intervals_do_not_meet(project: Project) -> None:
    """Evaluated every 5 steps, snapshots every 13, ended by `stop_when`: the exported weights are those of step 5.

    Each step is held in memory; the test above has snapshots in the store alone.
    """
    project.write("own.py", OWN)
    project.write("job.toml", OVERFITTED)
    sets = {"run_id": "o", "job": "overfitted"}
    run = project.start("run", "job.toml", "--run-id=o", **sets)
    assert run.end() == 0, run.told()
    assert [line["step"] for line in read_lines(run.run.metrics) if "eval" in line] == [*range(5, 36, 5)]
    export = project.start("snapshots", "export", "o", "best", "--format=torch", "--output=best.pt", **sets)
    assert export.end() == 0, export.told()
    assert ": step 5, far 0\n" in export.told(), export.told()
    assert "measured better" not in export.told()
    assert float(torch.load(project.root / "best.pt", weights_only=True)["moved"]) == -5
    (staged,) = [e for e in run.events() if e["event"] == "snapshot.committed" and e["step"] == 5]
    assert staged["trigger"] == "best"
