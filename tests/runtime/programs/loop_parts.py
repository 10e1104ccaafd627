"""What the loops of `tests/runtime/loop/test_misuses.py` are made of."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import elasticflow as ef
from elasticflow.errors import ElasticflowError
from tests.runtime.programs import dying

START = int(os.environ.get("START", "1"))
"""Number of this start of the run, from 1."""
SAMPLES, SIZE = 40, 8


class Numbers:
    """Each sample is a pair of its own number; another *first* makes it other data."""

    def __init__(self, samples: int = SAMPLES, first: int = 0) -> None:
        self._samples, self._first = samples, first

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(self._first + index)


class WithoutLength:
    """Read by number, without an end."""

    def __getitem__(self, index: int) -> int:
        return index


class Endless(torch.utils.data.IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class Counter(nn.Module):
    """Its weights tell which samples were learned, how often and, by momentum and decay, after which others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return what to descend on."""
        return -self.seen[numbers] * (1 + numbers / SAMPLES)


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer whose result depends on the order of samples."""
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, weight_decay=0.05)


def begin(model: nn.Module | None = None, **options: Any) -> tuple[ef.Run, nn.Module, torch.optim.SGD]:
    """Return a run, its model, wrapped, and its optimizer, both kept."""
    run = ef.join(**{"seed": 7, "every": "4 steps", "threads": 1, **options})
    model = run.wrap(model or Counter())
    optimizer = optimizer_of(model)
    run.keep(model=model, optimizer=optimizer)
    return run, model, optimizer


def backward(model: nn.Module, batch: Any) -> Tensor:
    """Add the gradients of *batch*; return its loss."""
    loss: Tensor = model(batch.inputs).mean()
    torch.autograd.backward(loss * batch.share)
    return loss


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Make the step of *batch*, but for `run.step`; return its loss."""
    optimizer.zero_grad()
    loss = backward(model, batch)
    optimizer.step()
    return loss


def refusal(call: str, variables: dict[str, Any]) -> str:
    """Return how *call* is refused, and go on."""
    try:
        exec(call, variables)
    except ElasticflowError as error:
        return error.message
    except Exception as error:  # noqa: BLE001  # which a sentence of ours is to come before
        return repr(error)
    return "it is not refused"


def die() -> NoReturn:
    """Kill this process once the run has committed a snapshot in this start."""
    dying.die_once_committed()


def note_steps(path: str) -> None:
    """Have the model's weights after each step written to *path*, in a list."""
    told, step = [], ef.Run.step

    def noting(run: ef.Run, **options: Any) -> None:
        step(run, **options)
        _, state = run._loop.require_keep("step")
        told.append(next(state.model.parameters()).detach().clone())
        torch.save(told, path)

    ef.Run.step = noting  # type: ignore[assignment]
