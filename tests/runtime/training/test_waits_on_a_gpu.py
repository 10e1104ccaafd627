"""Waits of each step object for a GPU, as torch itself counts them; on the CPU the same steps, of which none waits."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.random_streams import Generators
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.manual_step import ManualStep
from tests.gpu.marks import DEVICES
from tests.runtime.positions import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PIECES = 4
# The ballot of all ranks, the one wait that is asked for.
_MOST_WAITS = 1


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests run as torch does by itself."""
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def mean_loss(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the mean loss, its count and a scalar, all on the device."""
    loss = (model(inputs) - 3 * inputs).square().mean()
    return {"loss": loss, "count": inputs.isfinite().all(dim=1).sum(), "size": loss.detach()}


def moving(model: nn.Module, inputs: Tensor, optimizer: Any) -> Tensor:
    """Move the optimizer."""
    loss: Tensor = (model(inputs) - 3 * inputs).square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def made(me: Any, kind: str, device: torch.device) -> Callable[[Batch], Any]:
    """Return a step of a model of its own."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"precision": "fp32", "on_nonfinite": "stop"}
    if kind == "manual":
        return ManualStep(me, model, moving, optimizer).run
    step: Any
    if kind == "exact":
        step = ExactStep(me, model, mean_loss, virtual_shards=_PIECES, **options)
    else:
        step = DDPStep(me, model, mean_loss, **options)

    def run(batch: Batch) -> Any:
        loss = step.forward_backward(batch)
        optimizer.step()
        return loss

    return run


def batch(kind: str, device: torch.device) -> Batch:
    """Return a batch that is on the device already."""
    if kind == "manual":
        return Batch(8, Position(1, 8, 0, 8, False), [3], iter([(torch.randn(8, 8, device=device), 8)]))
    pieces = [(torch.randn(2, 8, device=device), 2) for _ in range(_PIECES)]
    return Batch(8, end_of(IndexSchedule(8, 8, epochs=1)), list(range(_PIECES)), iter(pieces))


@pytest.mark.parametrize("kind", ["ddp", "exact", "manual"])
@pytest.mark.parametrize("on", DEVICES)
def test_steps_wait_for_the_device_at_most_once(me: Any, on: str, kind: str) -> None:
    """Micro-batches, shards, counts and scalars wait for nothing; all of a step is launched ahead of the device."""
    device = torch.device("cpu")
    if on == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product of matrices
        device = torch.device(on, 0)
        torch.cuda.set_device(device)
    me.device, me.generators = device, Generators(11, device)
    me.generators.rest()
    run = made(me, kind, device)
    run(batch(kind, device))  # the first step of a process makes what later ones use
    prepared = batch(kind, device)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if on == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            run(prepared)
        finally:
            if on == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    told = [
        f"{wait.filename}:{wait.lineno}: {wait.message}"
        for wait in waits
        if "synchroniz" in str(wait.message)
    ]
    assert len(told) <= (_MOST_WAITS if on == "cuda" else 0), "\n".join(told)
