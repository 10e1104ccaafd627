"""The guide's job of a LightningModule, killed between an evaluation and the next step, and left alone at another world size."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from elasticflow.system import fault_injection
from tests.end_to_end.harness import named, read_lines, tensors
from tests.fenced_blocks import blocks

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

PROJECT = """
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn


class Rows:
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(100, 8, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def rows(seed=1):
    return Rows(seed)


class LitNet(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, inputs):
        return self.body(inputs)

    def _loss(self, batch, batch_idx, of):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log(f"{of}_loss", loss, prog_bar=True)
        return loss

    @rank_zero_only
    def write_rank(self):
        with open("ranks.txt", "a") as file:
            print(os.environ["RANK"], file=file)

    def training_step(self, batch, batch_idx):
        self.write_rank()
        return self._loss(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._loss(batch, batch_idx, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
"""
EXACT = """
consistency = "exact"
virtual_shards = 4

[nodes]
nproc_per_node = 2

[snapshots]
every = "1 epoch"
"""


def test_a_lightning_module_is_trained_as_a_job(project: Project) -> None:
    """The job of the guide, killed once with two workers or left alone with one: the same bits, rates and measurements."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    (job,) = (each.text for each in blocks() if "elasticflow.lightning:training_step" in each.text)
    project.write("project.py", PROJECT)
    project.write("job.toml", job + EXACT)
    killed = project.start(
        "run",
        "job.toml",
        "--run-id=killed",
        run_id="killed",
        job="lit",
        **{fault_injection.VARIABLE: "training.step=kill@17 rank=1 generation=1"},
    )
    assert killed.end() == 0, killed.told()
    assert len(named(killed.events(), "worker.failed")) == 1
    assert named(killed.events(), "preload.refused") == []
    assert set((project.root / "ranks.txt").read_text().split()) == {
        "0"
    }  # Lightning was imported before there were ranks
    alone = project.run("job.toml", "alone", "nodes.nproc_per_node=1", job="lit")
    assert alone.end() == 0, alone.told()

    lines, expected = read_lines(killed.run.metrics), read_lines(alone.run.metrics)
    for key in ("eval", "lr", "train_loss"):
        values = [(line["step"], line[key]) for line in lines if key in line]
        assert values == [(line["step"], line[key]) for line in expected if key in line]
        assert len(values) >= 6
    assert {key for line in lines for key in line.get("eval", {})} == {"val_loss"}
    rates = sorted({line["lr"] for line in lines if "lr" in line})
    assert rates == pytest.approx([0.0005, 0.005, 0.05])
    assert tensors(killed.run) == tensors(alone.run)
