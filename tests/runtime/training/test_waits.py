"""Places in a step at which the host waits for the device: none that nobody asked for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.manual_step import ManualStep
from tests.pretended_device import pretended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.pretended_device import Pretence


@pytest.fixture
def device() -> Iterator[Pretence]:
    """Return the pretended device."""
    with pretended() as pretence:
        yield pretence


def mean_loss(model: nn.Module, data: Any) -> Any:
    """Return the mean alone."""
    return cross_entropy(model(data[0]), data[1])


def counted_sum(model: nn.Module, data: Any) -> Any:
    """Return a sum and its count, both on the device."""
    return cross_entropy(model(data[0]), data[1], reduction="sum"), (data[1] != -100).sum()


def with_scalars(model: nn.Module, data: Any) -> Any:
    """Return a mean, its count and scalars, all on the device."""
    loss = mean_loss(model, data)
    return {"loss": loss, "count": (data[1] != -100).sum(), "one": loss.detach(), "two": loss.detach() * 2}


def adversarial(model: nn.Module, data: Any, made: dict[str, Any]) -> Any:
    """Move two optimizers, as a GAN does."""
    for optimizer in made.values():
        optimizer.zero_grad()
        loss = mean_loss(model, data)
        torch.autograd.backward(loss)
        optimizer.step()
    return {"loss": loss, "one": loss.detach()}


STEPS = {
    "DDP, mean loss": (DDPStep, mean_loss),
    "DDP, (loss sum, count)": (DDPStep, counted_sum),
    "DDP, dict with scalars": (DDPStep, with_scalars),
    "exact, mean loss": (ExactStep, mean_loss),
    "exact, (loss sum, count)": (ExactStep, counted_sum),
    "exact, dict with scalars": (ExactStep, with_scalars),
    "manual, 2 optimizers": (ManualStep, adversarial),
}


def batch(device: torch.device, number: int, pieces: int) -> Batch:
    """Return a batch of four samples a piece, on the device."""
    torch.manual_seed(number)
    data = [
        (torch.randn(4, 8).to(device), torch.randint(0, 4, (4,)).to(device)) for _ in range(pieces)
    ]
    end = Position(number, 4 * pieces * number, 0, 4 * pieces * number, False)
    return Batch(4 * pieces, end, list(range(pieces)), iter([(each, 4) for each in data]))


def make(me: Any, device: torch.device, how: str, pieces: int) -> tuple[nn.Module, Callable[[Batch], float]]:
    """Return a model and its step."""
    kind, step = STEPS[how]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(device)
    me.device = device
    if kind is ManualStep:
        made = {name: torch.optim.SGD(model[at].parameters(), lr=0.1) for name, at in (("g", 0), ("d", 2))}
        return model, ManualStep(me, model, step, made, clip_grad_norm=1.0).run
    options: dict[str, Any] = {"virtual_shards": pieces} if kind is ExactStep else {}
    return model, kind(me, model, step, precision="fp32", on_nonfinite="stop", **options).forward_backward


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("how", STEPS)
def test_waits_of_a_step(me: Any, device: Pretence, how: str, pieces: int) -> None:
    if how.startswith("manual") and pieces > 1: return
    _, run = make(me, device.device, how, pieces)
    for number in (1, 2, 3):
        given = batch(device.device, number + 5, pieces)
        device.waits.clear()
        run(given)
    print("TABLE", how, pieces, len(device.waits), dict(Counter(map(str,device.waits))))
