"""Optimizers that move by gradients of an earlier step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.loop.passes import Pass
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 12
OF_AN_EARLIER_STEP = r"moves by gradients of an earlier step"


class Loop:
    """A model of two layers, an optimizer for each, and a pass that ends as `Run.step` ends it."""

    def __init__(self, *, computes_gradients: bool = True, make: Callable[..., Any] = SGD) -> None:
        last = nn.Linear(2, 1)
        self.model, self.weight = nn.Sequential(nn.Linear(2, 2), last), last.weight
        self.first, self.second = (make(layer.parameters(), lr=0.1) for layer in self.model)
        self.passes = Pass()
        kept = {"model": self.model, "first": self.first, "second": self.second}
        self.passes.watch(State(**parts_of(kept)), computes_gradients=computes_gradients)

    def loss(self) -> torch.Tensor:
        """Return the sum of what the model returns."""
        outputs: torch.Tensor = self.model(torch.ones(1, 2))
        return outputs.sum()

    def backward(self) -> None:
        """Add gradients to all parameters."""
        self.loss().backward()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End a pass."""
        self.passes.settle(is_pending=self.passes.is_pending())


def added_up_beside_another(loop: Loop, number: int) -> None:
    """The first layer's gradients are added up over four passes; the second layer moves in each."""
    loop.backward()
    loop.second.step()
    loop.second.zero_grad()
    if number % 4 == 0:
        loop.first.step()
        loop.first.zero_grad()


def without_zero_grad(loop: Loop, number: int) -> None:
    """Nothing removes the gradients."""
    loop.backward()
    loop.first.step()
    loop.second.step()


def one_pass_late(loop: Loop, number: int) -> None:
    """The first layer moves by the gradients of the pass before."""
    if number > 1:
        loop.first.step()
    loop.model.zero_grad()
    loop.backward()
    loop.second.step()


@pytest.mark.parametrize("step", [added_up_beside_another, without_zero_grad, one_pass_late])
def test_gradients_that_outlive_a_step_are_refused_when_they_are_used(
    step: Callable[[Loop, int], None],
) -> None:
    """A restart between the two steps would be without them: other weights, and no word about it."""
    loop = Loop()

    def train() -> None:
        for number in range(1, STEPS):
            step(loop, number)
            loop.end()

    with pytest.raises(StateError, match=rf"^optimizer.(first|second) {OF_AN_EARLIER_STEP}"):
        train()


def before_the_backward(loop: Loop, number: int) -> None:
    """As most loops are."""
    loop.first.zero_grad()
    loop.second.zero_grad(set_to_none=False)
    loop.backward()
    loop.first.step()
    loop.second.step()


def added_up_together(loop: Loop, number: int) -> None:
    """Both move in every third pass."""
    loop.backward()
    if number % 3 == 0:
        loop.first.step()
        loop.second.step()
        loop.model.zero_grad(set_to_none=number % 2 == 0)


def left_in_the_other(loop: Loop, number: int) -> None:
    """As a GAN: the loss of each network leaves gradients in the other, which are removed before that one moves."""
    loop.first.zero_grad()
    loop.backward()
    loop.first.step()
    if number % 5 == 0:
        loop.second.zero_grad(set_to_none=False)
        loop.backward()
        loop.second.step()


@pytest.mark.parametrize("step", [before_the_backward, added_up_together, left_in_the_other])
def test_gradients_that_are_removed_or_of_one_step_are_used(step: Callable[[Loop, int], None]) -> None:
    """Nothing is refused that a restart does not lose."""
    loop = Loop()
    before = loop.weight.detach().clone()
    for number in range(1, STEPS):
        step(loop, number)
        loop.end()
    assert not torch.equal(loop.weight, before)


def test_an_optimizer_that_makes_gradients_itself_removes_those_before() -> None:
    """LBFGS calls a function within its move."""
    loop = Loop(make=LBFGS)

    def closure() -> Any:
        loop.model.zero_grad()
        loop.backward()
        return loop.loss().detach()

    for _ in range(STEPS):
        loop.first.step(closure)
        loop.second.step(closure=closure)
        loop.end()


def test_nothing_is_looked_at_after_the_first_moves() -> None:
    """To look at a gradient makes the host wait for the device."""
    loop = Loop()
    for number in range(STEPS):
        before_the_backward(loop, number)
        loop.end()
    assert not any(parameter._backward_hooks for parameter in loop.model.parameters())


@pytest.mark.parametrize("removes", [True, False])
def test_gradients_of_run_gradients_that_outlive_a_step(removes: bool) -> None:
    """They are added up until their optimizer moves, and the other one ends a step before."""
    loop = Loop(computes_gradients=False)

    def train() -> None:
        for number in range(1, STEPS):
            with loop.passes.adding_gradients():
                loop.backward()
            loop.second.step()
            loop.second.zero_grad()
            if number % 4 == 0:
                loop.first.step()
                loop.first.zero_grad()
            elif removes:
                loop.first.zero_grad(set_to_none=number % 2 == 0)
            loop.end()

    if removes:
        train()
    else:
        with pytest.raises(StateError, match=rf"^optimizer.first {OF_AN_EARLIER_STEP}"):
            train()


def without_zero_grad_of_run(loop: Loop) -> None:
    """What the optimizers have used is still there."""
    with loop.passes.adding_gradients():
        loop.backward()
    loop.first.step()
    loop.second.step()


def beside_a_backward(loop: Loop) -> None:
    """A penalty has a backward of its own."""
    loop.backward()
    with loop.passes.adding_gradients():
        loop.backward()
    loop.first.step()


@pytest.mark.parametrize("step", [without_zero_grad_of_run, beside_a_backward])
def test_gradients_that_are_not_of_run_gradients_are_refused(step: Callable[[Loop], None]) -> None:
    """They would be overwritten with virtual shards, and added to the step's without them."""
    loop = Loop(computes_gradients=False)

    def train() -> None:
        for _ in range(2):
            step(loop)
            loop.end()

    with pytest.raises(
        StateError, match=r"^run.gradients found gradients in the parameters of optimizer.first"
    ):
        train()


def test_gradients_that_an_optimizer_has_used_are_there_in_a_pass_for_another_one() -> None:
    """A critic and its generator take turns, each after a `zero_grad` of its own optimizer; the generator's loss reaches both."""
    loop = Loop(computes_gradients=False)
    of_generator, of_critic = loop.first, loop.second
    for number in range(STEPS):
        optimizer = of_critic if number % 2 else of_generator
        optimizer.zero_grad(set_to_none=number % 4 < 2)
        with loop.passes.adding_gradients():
            (loop.model[1](torch.ones(1, 2)) if number % 2 else loop.loss()).sum().backward()
        optimizer.step()
        loop.end()
        assert all(p.grad is not None for p in loop.model.parameters())


def test_an_optimizer_that_moves_by_a_backward_of_the_script_stands_beside_run_gradients() -> None:
    """As SAC's temperature does: its gradients are no longer looked at after some passes, and are nobody's but its own."""
    loop = Loop(computes_gradients=False)
    for _ in range(STEPS):
        loop.second.zero_grad()
        loop.model[1](torch.ones(1, 2)).sum().backward()
        loop.second.step()
        loop.first.zero_grad()
        with loop.passes.adding_gradients():
            loop.model[0](torch.ones(1, 2)).sum().backward()
        loop.first.step()
        loop.end()
