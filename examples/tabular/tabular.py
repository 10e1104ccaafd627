"""A perceptron for tables: columns of numbers, columns of categories, one number to tell.

Shapes: B rows, N columns of numbers, K columns of categories.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMBERS = 5
CATEGORIES = (4, 7)  # how many each column of categories has


class TabularNet(nn.Module):
    """Embeds categories, sets them beside the numbers, and tells one number for each row."""

    def __init__(
        self,
        numbers: int = NUMBERS,
        categories: Sequence[int] = CATEGORIES,
        width: int = 128,
        dropout: float = 0.05,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, min(16, count)) for count in categories)
        self.norm = nn.BatchNorm1d(numbers)  # columns have scales of their own
        inputs = numbers + sum(min(16, count) for count in categories)
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, width), nn.SiLU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.SiLU(), nn.Dropout(dropout)),
            nn.Linear(width, 1),
        )

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        """Return (B): one number for each row of `numbers` (B, N) and `categories` (B, K)."""
        columns = row["categories"].unbind(dim=1)
        embedded = [embed(column) for embed, column in zip(self.embeddings, columns, strict=True)]
        return self.layers(torch.cat((self.norm(row["numbers"]), *embedded), dim=1)).squeeze(1)


class Table(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Made-up rows after Friedman (1991): waves, squares, a slope, and what two categories add; a little noise.

    Read your own here: a CSV or Parquet file becomes three tensors as well.
    """

    def __init__(self, split: str = "train", rows: int = 8000) -> None:
        random = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.rand(rows, NUMBERS, generator=random)
        self.numbers = x * torch.tensor([1.0, 10.0, 100.0, 1.0, 0.1])
        self.categories = torch.stack(
            [torch.randint(count, (rows,), generator=random) for count in CATEGORIES], dim=1
        )
        a, b = self.categories.unbind(dim=1)
        waves = 10 * (math.pi * x[:, 0] * x[:, 1] + a).sin()
        noise = torch.randn(rows, generator=random)
        self.targets = waves + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + b + noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"numbers": self.numbers[index], "categories": self.categories[index]}, self.targets[index]


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error."""
    return (outputs - targets).abs().mean()


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the targets' variance that is told; of a whole set, not of a batch."""
    return 1 - (targets - outputs).square().sum() / (targets - targets.mean()).square().sum()
