"""The job's functions and classes as train.py calls them, one by one: what `--deep` tries out, and standbys trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime.process import random_streams
from torch import Tensor, nn

ROOT = Path("../../../..")
sys.path[:0] = [str(ROOT / part) for part in ["."]]
SEED = 20261120


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net(width=64)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of one micro-batch."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Any:
    """Return the optimizer, or several in a dict or list."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.001, fused=True)


def build_scheduler(optimizer: Any) -> Any:
    """Return the learning-rate schedule."""
    from torch.optim.lr_scheduler import OneCycleLR

    random_streams.begin(SEED, "scheduler")
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=2000)


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train", root="s3://datasets/mnist")
