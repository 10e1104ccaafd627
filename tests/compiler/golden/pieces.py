"""Factories that the golden jobs name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


def optimizer_of(model: nn.Module, *, lr: float, no_decay: list[str]) -> Optimizer:
    """Return SGD whose weight decay spares the parameters with these names."""
    named = dict(model.named_parameters())
    spared = [named.pop(name) for name in no_decay]
    groups: list[dict[str, Any]] = [
        {"params": spared},
        {"params": list(named.values()), "weight_decay": 0.01},
    ]
    return SGD(groups, lr=lr)


def training_step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the loss by name."""
    inputs, targets = batch
    return {"loss": cross_entropy(model(inputs), targets)}


def top_1(model: nn.Module, batch: Any) -> float:
    """Return the share of right answers."""
    inputs, targets = batch
    return float((model(inputs).argmax(1) == targets).float().mean())


def rows(folder: str, shard: int, shards: int) -> Iterator[str]:
    """Yield the lines of every so many files."""
    for path in sorted(Path(folder).iterdir())[shard::shards]:
        yield from path.read_text().splitlines()


def download() -> None:
    """Get nothing: the data is there."""


def collate(samples: list[Any]) -> Any:
    """Return torch's batch."""
    return default_collate(samples)


class Curriculum:
    """Which samples are easy enough: state of the job's own."""

    def __init__(self) -> None:
        self.level = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the level."""
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a level."""
        self.level = state["level"]


curriculum = Curriculum()
