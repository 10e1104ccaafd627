"""A loss that is a mean over tokens without padding: the same at every number of workers, once somebody counts them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

TOKENS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LONGEST = 11, 9


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    def forward(self, tokens):
        return self.layers(tokens)


def sentences(seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(48):
        words = torch.randint(VOCABULARY, (LONGEST + 1,), generator=generator)
        labels = words[1:].clone()
        labels[int(torch.randint(1, LONGEST, (), generator=generator)):] = -100
        found.append((words[:-1], labels))
    return found


def mean_over_tokens(outputs, labels):
    return cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)


def num_targets(batch):
    return (batch[1] != -100).sum()


def step(model, batch):
    loss = mean_over_tokens(model(batch[0]), batch[1])
    return {"loss": loss, "count": num_targets(batch), "perplexity": loss.detach().exp()}
"""
JOB = """
[job]
name = "tokens"
[model]
entry = "tokens:Reader"
{model}
[optimizer]
entry = "torch.optim:SGD"
args = {{ lr = 0.5 }}
[dataset]
entry = "tokens:sentences"
args = {{ seed = 1 }}
global_batch_size = 8
micro_batch_size = {micro}
[evaluation]
entry = "tokens:sentences"
args = {{ seed = 2 }}
batch_size = 16
every = "4 steps"
[train]
steps = 8
{train}
[nodes]
nproc_per_node = {workers}
"""
MEAN = 'loss = "tokens:mean_over_tokens"'
COUNTED = f'{MEAN}\nloss_count = "tokens:num_targets"'
STEP = 'step = "tokens:step"'
EXACT = 'consistency = "exact"\nvirtual_shards = 4'


def trained(
    project: Project, name: str, model: str, *, workers: int, micro: int = 8, train: str = ""
) -> Running:
    """Return a finished run of the job."""
    project.write("tokens.py", TOKENS)
    project.write(f"{name}.toml", JOB.format(model=model, workers=workers, micro=micro, train=train))
    running = project.start("run", f"{name}.toml", "--run-id", name, run_id=name, job="tokens")
    assert running.end() == 0, running.told()
    return running


def losses(running: Running) -> list[float]:
    """Return every loss of training and evaluation, in their order."""
    return [
        line["loss"] if "loss" in line else line["eval"]["loss"] for line in read_lines(running.run.metrics)
    ]


def test_padded_tokens_give_the_same_losses_at_every_number_of_workers(project: Project) -> None:
    """Counted by model.loss_count or by the step's dict, in both modes; uncounted, the first evaluation says so."""
    alone = trained(project, "alone", COUNTED, workers=1, train=EXACT)
    expected = losses(alone)
    assert len(expected) == 10
    three = trained(
        project,
        "three",
        STEP,
        workers=3,
        micro=3,
        train='precision = "fp32"\n[logging]\ncount_name = "tokens"',
    )
    assert expected == pytest.approx(losses(three), abs=1e-6)
    for running in (alone, three):
        assert named(running.events(), "loss.unweighed") == []
    assert named(three.events(), "loss.unused") == []
    ours, theirs = (read_lines(running.run.metrics) for running in (alone, three))
    steps = [(a["count"], b["count"], b) for a, b in zip(ours, theirs, strict=True) if "loss" in a]
    assert all(a == b for a, b, _ in steps)
    # A mean over tokens of what each micro-batch made of its own.
    assert all(line["perplexity"] >= math.exp(line["loss"]) * 0.9999 for *_, line in steps)
    assert all(line["tokens_per_s"] > 0 for *_, line in steps)

    uncounted = trained(project, "uncounted", MEAN, workers=2)
    assert expected != pytest.approx(losses(uncounted), abs=1e-6)
    (warned,) = named(uncounted.events(), "loss.unweighed")
    assert "warning" == warned["level"]
    assert "samples of a batch have different numbers of labels that count (not -100)" == warned["reason"]
    assert "model.loss_count" in uncounted.told()
