"""`elasticflow init` on a terminal, and the jobs it writes: they train at once."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pexpect
import pytest

import elasticflow
from tests.end_to_end.harness import Project

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.e2e

ROOT = Path(elasticflow.__file__).parents[1]
MODEL = """\
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x).relu()


class Other(nn.Module):
    pass


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2)
        self.block = Block(4 * 13 * 13)
        self.last = nn.Linear(4 * 13 * 13, width)

    def forward(self, images):
        return self.last(self.block(self.first(images).flatten(1)))
"""

GPT = """\
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    block_size: int = 16
    vocab_size: int = 50
    width: int = 8


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, idx, targets=None):
        logits, loss = self.head(self.tokens(idx)), None
        if targets is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def training_step(model, batch):
    return model(*batch)[1]


def load_data():
    tokens = torch.arange(64 * 17).reshape(64, 17) % 50
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
"""
SAMPLES = """\
import torch
from torch.utils.data import TensorDataset


def images(size: list[int]):
    random = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(64, 1, *size, generator=random), torch.arange(64) % 7)
    return samples
"""


def _call(folder: Path, *words: str, code: int = 0) -> str:
    done = Project(folder).call(*words)
    assert code == done.returncode, done.stdout + done.stderr
    return done.stdout


def _talk(folder: Path, words: Sequence[str], answers: Sequence[tuple[str, str]]) -> str:
    """Answer the questions of `init` on a terminal and return all that stood there."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "elasticflow", "init", *words],
        cwd=str(folder),
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        encoding="utf-8",
        timeout=300,
    )
    told = ""
    for question, answer in answers:
        child.expect(question)
        told += child.before + child.after
        child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert 0 == child.exitstatus, told + child.before
    return str(told + child.before)


def test_example_trains(tmp_path: Path) -> None:
    """From an empty folder to a trained network in two commands, without a question; git ignores what the run leaves."""
    (tmp_path / ".git").mkdir()
    _talk(tmp_path, [], [])
    out = _call(tmp_path, "run", "jobs/spirals.toml")
    accuracy = re.search(r"finished +accuracy ([0-9.]+)", out)
    assert accuracy is not None, out
    assert float(accuracy[1]) > 0.9
    assert "no difference" in _call(tmp_path, "diff", "spirals", "jobs/spirals.toml")

    assert (tmp_path / "runs" / ".gitignore").read_text().endswith("\n*\n")
    (launch,) = tmp_path.glob("runs/spirals/*/launches/0001")
    found = json.loads((launch / "environment.json").read_text())
    assert {"torch", "numpy", "elasticflow", "python"} <= found["versions"].keys()
    assert {"spirals/__init__.py"} == found["files"].keys()
    assert {"train", "evaluation"} == found["datasets"].keys()
    code = tmp_path / "spirals" / "__init__.py"
    code.write_text(code.read_text().replace("3.5 * radius", "4.5 * radius"))
    told = _call(tmp_path, "diff", "spirals", "jobs/spirals.toml", "--sources", code=1)
    assert "sources.spirals/__init__.py" in told
    assert "+    angle = 4.5 * radius" in told


def test_bare_model_trains(tmp_path: Path) -> None:
    """A file with three modules and no data: what is missing is asked for, and asked for again if it does not fit.

    The whole model of the file is offered, not its part; in the end the job is tried.
    """
    (tmp_path / "nets.py").write_text(MODEL)
    (tmp_path / "own.py").write_text(SAMPLES)
    question = r"model.args.width of nets:Net \(int\): "
    told = _talk(
        tmp_path,
        ["nets.py"],
        [
            ("which model.*:", "2"),
            (question, "seven"),
            (question, "7"),
            (r"model.loss, called with outputs and targets .*: ", "cross_entropy"),
            (r"dataset.entry \(module:name\): ", "faces"),
            (r"dataset.entry \(module:name\): ", "own:image"),
            (r"dataset.entry \(module:name\): ", "own:images"),
            (r"dataset.args.size of own:images \(list\[int\]\): ", "28, 28"),
        ],
    )
    assert "'seven' is not int" in told
    assert "'faces' is not of the form module:name" in told
    assert "'own:image' does not exist" in told
    assert re.search(r"  1  nets:Other +nets.py:13", told)
    assert re.search(r"works 64 samples of \(float32 \(1, 28, 28\), int64 \(\)\)", told)
    job = (tmp_path / "jobs" / "net.toml").read_text()
    assert "args = { width = 7 }" in job
    assert "args = { size = [28, 28] }" in job
    assert "finished" in _call(tmp_path, "run", "jobs/net.toml", "--set", "train.epochs=1")


@pytest.mark.campaign
def test_model_with_a_config_that_computes_its_loss_trains(tmp_path: Path) -> None:
    """As language models are published: an object as argument, the loss from `forward`; nothing is asked or edited."""
    (tmp_path / "gpt.py").write_text(GPT)
    told = _call(tmp_path, "init", "gpt.py", "--yes")
    assert re.search(r"works 64 samples of \(int64 \(16,\), int64 \(16,\)\)", told)
    assert "finished" in _call(tmp_path, "run", "jobs/gpt.toml", "--set", "train.epochs=1")

    (tmp_path / "gpt.py").write_text(
        GPT.replace("import torch\n", "import torch\nraise RuntimeError('no licence')\n")
    )
    told = _call(tmp_path, "init", "gpt.py", "--yes", "--name=other", code=1)
    assert "no licence" in told
    assert "what stands above keeps it from training" in told
