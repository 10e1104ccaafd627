"""The smallest example: a job and a package with a model, its data and its metric, for `elasticflow init` alone."""

from __future__ import annotations

from typing import Any

from elasticflow.scaffold.job_text import text_of

_CODE = '''"""Three spirals in a plane: a small network that tells them apart, its data and its metric."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A perceptron with two hidden layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return the scores (samples, 3) of points (samples, 2)."""
        return self.layers(points)


def spirals(split: str = "train", samples: int = 3000) -> TensorDataset:
    """Return points and the number (0 to 2) of the spiral each lies on: the same ones on every machine."""
    random = torch.Generator().manual_seed(0 if split == "train" else 1)
    labels = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=random)
    angle = 3.5 * radius + labels * (2 * math.pi / 3) + 0.15 * torch.randn(samples, generator=random)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), labels)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose highest score is the right one."""
    return (outputs.argmax(dim=1) == targets).float().mean()
'''


def spirals(name: str, *, epochs: int, batch_size: int, workers: int | str) -> tuple[str, dict[str, str]]:
    """Return the text of a job for the package *name*, and the package's files by path from the project's root."""
    evaluation = (
        "[evaluation]",
        f'entry = "{name}:spirals"',
        'args = { split = "test", samples = 600 }',
        'every = "1 epoch" | or "100 steps"',
        f'metrics = {{ accuracy = "{name}:accuracy" }} | called with outputs and targets',
        'best = "max accuracy" | what keep.best means',
        "",
    )
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "entry": f"{name}:Net",
            "args": {"width": 64},
            "loss": "torch.nn.functional:cross_entropy",
        },
        "optimizer": {"entry": "torch.optim:AdamW", "args": {"lr": 1e-2}},
        "dataset": {"entry": f"{name}:spirals", "global_batch_size": batch_size},
    }
    text = text_of(name, tables, evaluation=evaluation, epochs=epochs, workers=workers)
    return text, {f"{name}/__init__.py": _CODE}
