"""Factories that the golden jobs name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


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


def lengths(dataset: Sequence[Any]) -> list[int]:
    """Return how long each sample is."""
    return [len(sample) for sample in dataset]


def collate(samples: list[Any]) -> Any:
    """Return torch's batch."""
    return default_collate(samples)


def batches_of(size: int) -> Callable[[list[Any]], Any]:
    """Return what makes batches of images, whose sides are so long."""

    def made(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        assert batch[0].shape[-1] == size
        return batch

    return made


class Padded:
    """Makes a batch of lists of unlike lengths."""

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def __call__(self, samples: list[list[int]]) -> Tensor:
        """Return the lists as rows, filled up to the longest one."""
        longest = max(map(len, samples))
        return torch.tensor([[*row, *[self._padding] * (longest - len(row))] for row in samples])


@dataclass
class GPTConfig:
    """Sizes of a model."""

    n_layer: int
    n_embd: int = 768
    activation: Callable[..., Tensor] = nn.functional.gelu


class GPT(nn.Module):
    """A stack of layers, as public code has it: sizes in a config, its optimizer in a method."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer))
        self.activation = config.activation

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss over the tokens that count."""
        hidden, targets = batch
        for layer in self.layers:
            hidden = self.activation(layer(hidden))
        return cross_entropy(hidden.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: Sequence[float]
    ) -> Optimizer:
        """Return AdamW."""
        first, second = betas
        return AdamW(self.parameters(), lr=learning_rate, betas=(first, second), weight_decay=weight_decay)


def num_targets(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return how many tokens count."""
    return (batch[1] != -1).sum()


def sentences(block_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return no sentences."""
    return []


class Curriculum:
    """Which samples are easy enough: state of the job's own."""

    def __init__(self) -> None:
        self.level = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the level."""
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a level."""
        self.level = state["level"]


curriculum = Curriculum()


def two_optimizers(model: nn.Module, *, lr: float) -> dict[str, Optimizer]:
    """Return one optimizer for the body and one for the head."""
    *body, head = model.children()
    return {
        "body": SGD([p for part in body for p in part.parameters()], lr=lr),
        "head": SGD(head.parameters(), lr=10 * lr),
    }


def rates(optimizers: dict[str, Optimizer], gamma: float) -> dict[str, ExponentialLR]:
    """Return a schedule for each."""
    return {name: ExponentialLR(each, gamma) for name, each in optimizers.items()}


def own_step(model: nn.Module, batch: Any, optimizers: dict[str, Optimizer]) -> Tensor:
    """Move one optimizer after the other."""
    inputs, targets = batch
    loss = cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers.values():
        optimizer.step()
    return loss


def sample(context: Any, length: int = 3) -> None:
    """Log a text, as a hook."""
    context.log_text("sample", "a" * length)
