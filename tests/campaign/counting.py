"""In place of examples/rungs/small.py: models whose weights count how often, and in which steps, each sample was learned from.

The gradient of `seen[i]` is what sample i counts in the global batch: times the batch's samples it is 1, whatever ranks and parts
it went through. So `seen` ends as the number of epochs in each place, and the optimizer's `order` as the sum of the numbers of
the steps that had the sample: the same as without kills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 640
SIZES = {"tutorial": 32, "mingpt": 16, "nanogpt": 32}  # global batches of the scripts


class Counting(torch.optim.Optimizer):
    """Adds to a weight its gradient times the global batch's samples."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__([*model.parameters()], {"lr": 1.0, "size": size})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Count the samples of this step."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["order"] = torch.tensor(0.0), torch.zeros_like(weight)
                state["step"] += 1
                counted = -group["size"] * weight.grad
                weight.add_(counted)
                state["order"] += state["step"] * counted


class Indices(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are their own numbers."""

    vocab_size = SAMPLES

    def __init__(self, part: range | None = None) -> None:
        self.part = part

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index]), torch.tensor(0)


class Net(nn.Module):
    """The weight of each sample."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, source: Tensor, targets: Tensor | None = None) -> Any:
        """Return the samples' weights; with targets their loss, too, as a GPT does."""
        weights = self.seen[source[:, 0]]
        return weights if targets is None else (weights, cross_entropy(weights, targets))

    def configure_optimizers(self, rate: float) -> Counting:
        """Return what counts; *rate* does not matter to it."""
        from pathlib import Path
        from sys import argv

        return Counting(self, SIZES[Path(argv[0]).stem.partition("_")[0]])


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what has the gradient -1 / B for each sample."""
    return -outputs.mean()


def load_train_objs() -> tuple[Indices, Net, Counting]:
    """Return the tutorial's dataset, model and optimizer."""
    model = Net()
    return Indices(), model, Counting(model, SIZES["tutorial"])


Letters, GPT = Indices, Net
