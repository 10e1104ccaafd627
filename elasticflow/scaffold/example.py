"""Code for a beginning: a small example, and data made up for a model that has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.scaffold.shapes import Shapes

_MOST_CLASSES = 1000
MADE_UP = '"""Made-up data for '
"""How a module of made-up data begins."""

EXAMPLE = '''"""Three spirals in a plane: a small network that tells them apart, its data and its metric."""

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

_DATA = '''"""Made-up data for {model}: samples of the right shape, with {what} that can be learned.

Put your own in its place: anything with `__len__` and `__getitem__` that gives (input, target).
"""

import torch
from torch.utils.data import TensorDataset

SAMPLE = {sample}  # shape of one input
{constants}

def samples(count: int = 512) -> TensorDataset:
    """Return inputs and targets: the same ones on every machine."""
    random = torch.Generator().manual_seed(0)
{body}
    return TensorDataset(inputs, targets)
'''


_TEXTS = '''"""Made-up data for {model}: rows of tokens, each followed by one that can be learned.

Put your own in its place: anything with `__len__` and `__getitem__` that gives (tokens, next tokens).
"""

import torch
from torch.utils.data import TensorDataset

LENGTH = {length}  # tokens of one sample
TOKENS = {tokens}  # they are whole numbers below this


def samples(count: int = 512) -> TensorDataset:
    """Return inputs and targets: the same ones on every machine."""
    random = torch.Generator().manual_seed(0)
    first = torch.randint(TOKENS, (count, 1), generator=random)
    rows = (first + 3 * torch.arange(LENGTH + 1)) % TOKENS
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
'''


def made_up_texts(model: str, shapes: Shapes) -> str:
    """Return the source of a module whose `samples` are tokens and the tokens that follow them."""
    return _TEXTS.format(model=model, length=shapes.sample[0], tokens=shapes.tokens)


def made_up_data(model: str, shapes: Shapes) -> str:
    """Return the source of a module whose `samples` fit *shapes*."""
    is_class = shapes.outputs is None or 1 < shapes.outputs <= _MOST_CLASSES
    constants = f"CLASSES = {shapes.outputs or 2}" if is_class else f"OUTPUTS = {shapes.outputs}"
    lines = ["inputs = torch.randn(count, *SAMPLE, generator=random)"]
    reals = "inputs"
    if shapes.tokens is not None:
        constants += f"\nTOKENS = {shapes.tokens}  # inputs are whole numbers below this"
        lines = ["inputs = torch.randint(TOKENS, (count, *SAMPLE), generator=random)"]
        reals = "inputs.float()"
    number = "CLASSES" if is_class else "OUTPUTS"
    lines.append(f"hidden = torch.randn({reals}[0].numel(), {number}, generator=random)")
    scores = f"{reals}.flatten(1) @ hidden"
    lines.append(
        f"targets = ({scores}).argmax(dim=1)" if is_class else f"targets = {scores} / hidden.shape[0] ** 0.5"
    )
    return _DATA.format(
        model=model,
        what="classes" if is_class else "targets",
        sample=shapes.sample,
        constants=f"{constants}\n",
        body="\n".join(f"    {line}" for line in lines),
    )


def loss_for(shapes: Shapes) -> str:
    """Return the loss that fits the targets of `made_up_data`."""
    is_class = shapes.outputs is None or 1 < shapes.outputs <= _MOST_CLASSES
    return "torch.nn.functional:cross_entropy" if is_class else "torch.nn.functional:mse_loss"
