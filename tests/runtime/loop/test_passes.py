"""Gradients that `Run.gradients` adds up until an optimizer uses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.loop.passes import Pass
from elasticflow.runtime.state.state import State


def test_gradients_wait_for_the_optimizer_of_their_parameters() -> None:
    """Of two optimizers, as a GAN has: a step of one leaves what was added up for the other, and its own begins anew."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    one, other = (next(part.parameters()) for part in model)
    optimizers = {"one": SGD([one], lr=0.1), "other": SGD([other], lr=0.1)}
    passes = Pass()
    passes.watch(State(**parts_of({"model": model, **optimizers})))

    def add(**gradients: float) -> dict[str, float | None]:
        with passes.adding_gradients():
            for name, parameter in (("one", one), ("other", other)):
                if name in gradients:
                    parameter.grad = torch.full((1, 1), gradients[name])
        return {
            name: None if parameter.grad is None else parameter.grad.item()
            for name, parameter in (("one", one), ("other", other))
        }

    assert add(one=1.0) == {"one": 1.0, "other": None}
    assert add(other=10.0) == {"one": 1.0, "other": 10.0}
    assert add(one=2.0, other=20.0) == {"one": 3.0, "other": 30.0}
    optimizers["one"].step()
    assert add(one=4.0, other=40.0) == {"one": 4.0, "other": 70.0}
    optimizers["other"].zero_grad()
    assert add(other=80.0) == {"one": 4.0, "other": 80.0}


def test_a_batch_has_its_gradients_once() -> None:
    """Its samples are read by then: a second call in the pass would find none."""
    passes = Pass()
    passes.note_gradients()
    with pytest.raises(StateError, match=r"run.gradients was called a second time in one pass"):
        passes.note_gradients()
    batch: Any = SimpleNamespace(end=SimpleNamespace(step=2))
    passes.open(batch)
    passes.note_gradients()
