"""Two sets, metrics over the whole of each and an end by what they measure: through a kill, and at another world size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.system import fault_injection
from tests.end_to_end.harness import named, read_lines, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

OWN = '''
import torch
import torch.distributed
from torch import nn


class Rows:
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(n, 8, generator=generator)
        self.targets = (self.inputs.sum(1) + torch.randn(n, generator=generator) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, inputs):
        return self.body(inputs)


class Auroc:
    """Over the whole set: the share of pairs that are in the right order; gathers by itself where it is not alone."""

    def __init__(self, positive):
        self.positive, self.scores, self.targets = positive, [], []

    def update(self, outputs, targets):
        self.scores.append(outputs[:, self.positive])
        self.targets.append(targets == self.positive)

    def compute(self):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # as torchmetrics' do: rank 0 alone would wait for ever
        scores, is_positive = torch.cat(self.scores), torch.cat(self.targets)
        return (scores[is_positive][:, None] > scores[~is_positive][None]).float().mean()


def guesses(model, batch):
    assert not model.training
    inputs, targets = batch
    return {"guesses": model(inputs).argmax(1)}, targets


def hits(outputs, targets):
    return (outputs == targets).float().mean()


def median(outputs, targets):
    return outputs[:, 1].median()
'''
JOB = """
[job]
name = "sets"
[model]
entry = "own:Net"
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 0.02 }
[lr_scheduler]
entry = "torch.optim.lr_scheduler:ReduceLROnPlateau"
args = { factor = 0.5, patience = 0 }
interval = "evaluation"
metric = "val.loss"
[dataset]
entry = "own:Rows"
args = { n = 200, seed = 1 }
global_batch_size = 16
[evaluation.val]
entry = "own:Rows"
args = { n = 83, seed = 2 }
every = "5 steps"
batch_size = 10
best = "max auroc"
[evaluation.val.metrics]
auroc = { entry = "own:Auroc", args = { positive = 1 } }
median = { entry = "own:median", over = "set" }
perplexity = "elasticflow.metrics:perplexity"
[evaluation.train]
entry = "own:Rows"
args = { n = 200, seed = 1 }
every = "10 steps"
samples = 30
batch_size = 10
step = "own:guesses"
metrics = { hits = { entry = "own:hits", outputs = "guesses" } }
[train]
steps = 400
consistency = "exact"
virtual_shards = 4
threads = 1
stop_when = "val.loss not better for 3 evaluations"
[nodes]
nproc_per_node = 2
[snapshots]
every = "6 steps"
keep = { last = 2, best = 1 }
"""


def evaluated(running: Running) -> dict[int, dict[str, Any]]:
    """Return what a run measured, by step."""
    return {line["step"]: line["eval"] for line in read_lines(running.run.metrics) if "eval" in line}


def told(project: Project, command: str, run_id: str) -> str:
    """Return what a command says about a run."""
    asked = project.call(command, run_id)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def test_sets_are_measured_alike_and_end_training_alike(project: Project) -> None:
    """Killed with two workers, or left alone with three: the same numbers, learning rates, end and bits.

    The schedule goes by a metric. One kill is between an evaluation and the snapshot of the same step, one between that
    snapshot and the next step.
    """
    project.write("own.py", OWN)
    project.write("job.toml", JOB)
    faults = "training.step=kill@10 rank=1 generation=1, training.step=kill@2 rank=1 generation=2"
    killed = project.start(
        "run",
        "job.toml",
        "--run-id=killed",
        "--set=snapshots.memory=1 step",
        run_id="killed",
        job="sets",
        **{fault_injection.VARIABLE: faults},
    )
    assert killed.end() == 0, killed.told()
    assert [each["step"] for each in named(killed.events(), "training.started")] == [0, 9, 10]
    three = project.start(
        "run", "job.toml", "--run-id=three", "--set=nodes.nproc_per_node=3", run_id="three", job="sets"
    )
    assert three.end() == 0, three.told()

    lines = evaluated(killed)
    assert lines == evaluated(three)
    assert set(lines[5]) == {"val.loss", "val.auroc", "val.median", "val.perplexity"}
    assert set(lines[10]) - set(lines[5]) == {"train.hits"}
    assert tensors(killed.run) == tensors(three.run)

    rates = {line["step"]: line["lr"] for line in read_lines(killed.run.metrics) if "lr" in line}
    assert rates == {line["step"]: line["lr"] for line in read_lines(three.run.metrics) if "lr" in line}
    assert len(set(rates.values())) > 1

    losses = {step: line["val.loss"] for step, line in lines.items()}
    best, last = min(losses, key=lambda step: (losses[step], step)), max(losses)
    assert last == best + 15 < 400
    (stopped,) = named(killed.events(), "training.stopped")
    assert (stopped["step"], stopped["by_rank"]) == (last, None)
    reason = f"train.stop_when: val.loss was not better for 3 evaluations: the best is {losses[best]:.6g}, of step {best}"
    assert stopped["reason"] == reason
    assert reason in told(project, "status", "killed")
    assert reason in told(project, "why", "killed")
