"""Small models of every kind whose trajectory is looked at, as a job's own code; projects get a copy of this file."""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

PAUSE_S = float(
    os.environ.get("TRAJECTORY_PAUSE_S", "0.004")
)  # of each forward: steps long enough to be disturbed
STEPS, WARM_UP = 40, 5
COUNTED = 120


class Images:
    """A hundred of noise with labels; each reading adds noise of the moment, from every generator there is."""

    fingerprint = "100 images"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(100, 1, 8, 8, generator=generator)
        self.targets = torch.randint(0, 4, (100,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(1, 8, 8) + 0.1 * random.random() + 0.1 * np.random.rand()  # noqa: NPY002
        return self.inputs[index] + noise.float(), self.targets[index]


class Few(Images):
    """The last ten of them."""

    fingerprint = "10 images"

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.targets = self.inputs[-10:], self.targets[-10:]


class Transformer(nn.Module):
    """Eight rows of eight pixels as tokens; dropout; input and output weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16, bias=False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.project = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.layers(self.embed(inputs.squeeze(1)))
        result: Tensor = self.last(self.head(self.project(tokens)).mean(1))
        return result


def mlp() -> nn.Module:
    """Return a small net with dropout."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))


def cnn() -> nn.Module:
    """Return a net with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 4)
    )


def mean_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one piece."""
    time.sleep(PAUSE_S)
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def sums_step(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return sum of the losses of one piece, and their number."""
    time.sleep(PAUSE_S)
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def warm_cosine(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule that warms up, then goes down along a cosine."""

    def factor(step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))

    return LambdaLR(optimizer, factor)


class Numbers:
    """The sample's number."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return COUNTED

    def __getitem__(self, index: int) -> int:
        return index


class Counter(nn.Module):
    """One parameter, which counts how often each sample was trained on; see Tally."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(COUNTED))

    def forward(self, indices: Tensor) -> Tensor:
        """Return what to descend on."""
        return -self.counts[indices]


class Tally(SGD):
    """Adds how often each sample was in the batch: its gradient is that divided by the batch's size, whatever that is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count; the rarest sample of a batch is in it once."""
        (counts,) = self.param_groups[0]["params"]
        times = counts.grad / counts.grad[counts.grad != 0].abs().min()
        with torch.no_grad():
            counts -= times.round()


def count_step(model: nn.Module, batch: Tensor) -> Tensor:
    """Return what to descend on, for one piece."""
    time.sleep(PAUSE_S)
    result: Tensor = model(batch).mean()
    return result
