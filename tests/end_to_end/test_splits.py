"""Training and evaluation data of one split at random: no sample in both, at any world size, through kill and resume."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from tests.end_to_end.harness import named

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

DATA = '''
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split


def digits(split):
    """Split one set at random, as in many a notebook, and note what came of it."""
    images = torch.linspace(0, 1, 480 * 784).reshape(480, 1, 28, 28)
    full = TensorDataset(images, torch.arange(480) % 10)
    train, test = random_split(full, [400, 80])
    part = {"train": train, "test": test}[split]
    folder = Path("opened")
    folder.mkdir(exist_ok=True)
    (folder / f"{split}-{os.getpid()}.json").write_text(json.dumps(list(part.indices)))
    return part


def everything():
    """Evaluate on the whole set, which the training data is a part of."""
    return digits("train").dataset


def loss(outputs, targets):
    """Take time until nobody comes too late any more."""
    if torch.is_grad_enabled() and not Path("hurry").exists():
        time.sleep(0.1)
    return cross_entropy(outputs, targets)
'''
SETS = (
    "dataset.entry=data:digits",
    "evaluation.entry=data:digits",
    "evaluation.metrics={}",
    "evaluation.best=min loss",
    "model.args={ width = 4 }",
    "model.loss=data:loss",
    "train.epochs=8",
)


def splits(project: Project, part: str) -> list[list[int]]:
    """Return the samples that each process got for this part."""
    return [json.loads(path.read_text()) for path in sorted((project.root / "opened").glob(f"{part}-*.json"))]


def test_no_sample_of_the_evaluation_is_trained_on(project: Project) -> None:
    """Two workers, one killed; drained; resumed by one: each opens the same two parts of one permutation."""
    project.write("data.py", DATA)
    began = project.run("jobs/mnist.toml", "split", *SETS)
    began.wait_for_step(8)
    os.kill(began.pid_of(1), signal.SIGKILL)
    began.wait_for_step(12, generation=1)
    os.kill(began.process.pid, signal.SIGTERM)
    assert began.end() == 75, began.told()
    project.write("hurry", "")
    resumed = project.run("jobs/mnist.toml", "split", *SETS, "nodes.nproc_per_node=1")
    assert resumed.end() == 0, resumed.told()

    train, test = splits(project, "train"), splits(project, "test")
    assert (len(train), len(test)) == (5, 5)
    assert sorted(train[0] + test[0]) == list(range(480))
    assert train == [train[0]] * 5
    assert test == [test[0]] * 5


def test_an_evaluation_of_what_is_trained_on_is_told(project: Project) -> None:
    """By the run that begins, once, not by the one that goes on."""
    project.write("data.py", DATA)
    project.write("hurry", "")
    leak = ("evaluation.entry=data:everything", "evaluation.args=", "nodes.nproc_per_node=1")
    for epochs in (1, 2):
        run = project.run("jobs/mnist.toml", "leak", *SETS, *leak, f"train.epochs={epochs}")
        assert run.end() == 0, run.told()
        (event,) = named(run.events(), "overlap.found")
        assert (event["found"], event["looked_up"], event["compared"]) == (400, 480, 400)
        is_told = "400 of 480 evaluation samples looked up are in the training data" in run.told()
        assert is_told == (epochs == 1), run.told()
