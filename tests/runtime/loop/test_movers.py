"""Optimizers and models that were made anew after `run.keep` are found in the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.loop.movers import Movers
from elasticflow.runtime.state.state import State
from tests.runtime.snapshot.test_unsaved import Lookahead, TwoAdams


def net() -> nn.Module:
    """Return a model."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def watching(model: nn.Module, optimizer: Optimizer, **more: Any) -> Movers:
    """Return what sees the steps after `run.keep`."""
    return Movers(State(**parts_of({"model": model, "optimizer": optimizer, **more})))


def step(model: nn.Module, *optimizers: Optimizer) -> None:
    """Take a step."""
    model(torch.ones(3, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Adam, SGD])
def test_an_optimizer_made_anew_is_refused_after_its_first_step(kind: type[Optimizer]) -> None:
    """It moves the kept model, and the kept optimizer does not."""
    model = net()
    movers = watching(model, kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    step(model, optimizer)
    with pytest.raises(
        StateError, match=rf"optimizer that run.keep was not given, a torch.optim.\w+.{kind.__name__}"
    ):
        movers.require_kept()


def test_one_made_anew_later_is_refused_then() -> None:
    """From Adam to SGD with momentum at some epoch: its momentum would be lost."""
    model = net()
    optimizer = Adam(model.parameters())
    movers = watching(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
        movers.require_kept()
    step(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(StateError, match="no snapshot holds its state"):
        movers.require_kept()


def test_a_model_made_anew_is_refused_with_its_optimizer_and_without() -> None:
    """Either the kept optimizer does not move, or it moves what has no gradient."""
    model = net()
    optimizer = Adam(model.parameters())
    movers = watching(model, optimizer)
    other = net()
    step(other, optimizer)
    with pytest.raises(
        StateError, match="no parameter of the kept model had a gradient: the model was made anew"
    ):
        movers.require_kept()

    movers = watching(model, optimizer)
    step(other, Adam(other.parameters()))
    with pytest.raises(StateError, match=r"model and optimizer were made anew after run.keep"):
        movers.require_kept()


def test_weights_that_the_script_averages_itself_are_not_a_model_made_anew() -> None:
    """Federated averaging: copies of the model are trained within the pass, by optimizers of their own."""
    model = net()
    movers = watching(model, Adam(model.parameters()))
    for _ in range(2):
        local = net()
        step(local, SGD(local.parameters(), lr=0.1, momentum=0.9))
        model.load_state_dict(local.state_dict())
        movers.require_kept()


def test_a_layer_made_anew_is_refused_by_name() -> None:
    """A head for other classes, set in after `run.keep`."""
    model = net()
    optimizer = Adam(model.parameters())
    movers = watching(model, optimizer)
    model[1] = nn.Linear(2, 1)  # type: ignore[operator]
    step(model, optimizer)
    with pytest.raises(StateError, match=r"model\.1\.weight was replaced after run.keep") as caught:
        movers.require_kept()
    assert "parameter.data.copy_(...)" in str(caught.value)


def test_what_moves_as_it_should_is_not_refused() -> None:
    """Accumulated gradients, a GAN, optimizers inside another, and one that is made for an inner loop of its own."""
    model, critic = net(), net()
    optimizer, other = Adam(model.parameters()), Adam(critic.parameters())
    movers = watching(model, optimizer, critic=critic, other=other)
    step(critic, other)  # the critic's turn
    movers.require_kept()
    model(torch.ones(3, 2)).sum().backward()  # gradients alone
    movers.require_kept()
    noise = torch.zeros(3, 2, requires_grad=True)
    attack = Adam([noise])
    for _ in range(2):
        model(noise).sum().backward()
        attack.step()
        step(model, optimizer)
        SGD(model.parameters(), lr=0.1).step()  # without a state
        movers.require_kept()


@pytest.mark.parametrize("kind", [TwoAdams, Lookahead])
def test_optimizers_inside_a_kept_one_are_kept(kind: Any) -> None:
    """Whoever calls their `step`."""
    model = net()
    optimizer = kind(model.parameters())
    movers = watching(model, optimizer)
    for _ in range(2):
        step(model, optimizer)
        movers.require_kept()
