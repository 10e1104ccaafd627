"""The training state that the snapshot benchmark saves and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Trained:
    """What is saved: a model and its AdamW, one step old."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, the tensors live."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, scalars left out."""
        moments = [t for per in self.optimizer.state.values() for t in per.values() if torch.is_tensor(t)]
        return sum(t.nbytes for t in (*self.model.state_dict().values(), *moments) if t.dim())


def build(parameters: int) -> Trained:
    """Return a transformer's shapes with about *parameters* of them: wide matrices, and many small vectors."""
    blocks = 12
    width = max(8, round((parameters / (blocks * 12 + 8)) ** 0.5) // 8 * 8)
    layers: list[nn.Module] = [nn.Embedding(8 * width, width)]
    for _ in range(blocks):
        layers += [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)]
        layers += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return Trained(model, optimizer)
