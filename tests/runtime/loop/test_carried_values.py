"""Loops over `enumerate(...)` as the source of a script tells them, and what methods of a class compute from its own values."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from elasticflow.runtime.loop.carried_values import Enumerated, accumulated_by, enumerated_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOUND: list[Enumerated | None] = []


def batches() -> Iterator[int]:
    """Note what is found at the head of the loop that fetches a batch."""
    FOUND.append(enumerated_at(sys._getframe(1)))
    yield 3


def logged(iterable: Iterable[Any]) -> Iterator[Any]:
    """Fetch for a loop, as a progress bar does."""
    yield from iterable


def adjust(optimizer: SGD, number: float) -> None:
    """Set the rate."""
    optimizer.param_groups[0]["lr"] = number


def test_a_loop_that_counts_from_its_beginning_is_found_with_the_use_of_its_number() -> None:
    """Also behind a progress bar, in a variable, or from an epoch's first step; not one that begins where the run stands."""
    optimizer = SGD([nn.Parameter(torch.ones(1))])
    run, group, rates = (
        SimpleNamespace(position=SimpleNamespace(step=4)),
        optimizer.param_groups[0],
        [0.1] * 9,
    )
    FOUND.clear()
    for number, batch in enumerate(logged(batches())):
        if number % 2 == 0:
            print(number, batch)
    for number, _ in enumerate(batches()):
        place = number // 2
        group["lr"] = rates[place]
    for number, _ in logged(enumerate(batches(), start=run.position.step // 5 * 8)):
        adjust(optimizer, number)
    bar = logged(enumerate(batches(), start=len(rates) * 8))
    for number, _ in bar:
        progress = number / 8
        adjust(optimizer, progress)
    for number, _ in enumerate(batches(), run.position.step):
        adjust(optimizer, number)
    for number, _ in zip(range(9), batches(), strict=False):
        adjust(optimizer, number)
    for number, _ in zip(range(run.position.step, 9), batches(), strict=False):
        adjust(optimizer, number)
    for _ in logged(batches()):
        pass
    learned, shown = Enumerated("number", is_learned_from=True), Enumerated("number", is_learned_from=False)
    assert FOUND == [shown, learned, None, learned, None, learned, None, None]


class RunningMean:
    """Normalizes observations."""

    def __init__(self) -> None:
        self.mean, self.count, self.last = np.zeros(3), 0, np.zeros(3)
        self.history, self.returns, self.length = np.zeros((2, 3)), np.zeros(3), torch.zeros(())
        self.advantages = np.zeros(3)

    def update(self, batch: Any) -> None:
        """Take a batch in."""
        delta = batch - self.mean
        self.count += 1
        self.mean = self.mean + delta / self.count
        self.last = batch.copy()
        self.history[:-1] = self.history[1:]
        self.advantages[:2] = batch[:2]
        for place in (1, 0):
            self.returns[place] = self.returns[place + 1] + batch[place]
        mean: Tensor = self.length.lerp(torch.ones(()), 0.1)
        self.length.copy_(mean)

    def scale(self) -> None:
        """Scale what was filled in."""
        self.advantages = self.advantages - self.advantages.mean()


class Meter(RunningMean):
    """Shows its mean, and begins anew."""

    def reset(self) -> None:
        """Begin anew."""
        self.count = 0


def test_what_a_class_computes_from_its_own_values_is_known() -> None:
    """A mean and a history, not the newest batch, the returns and advantages of a storage, or a meter."""
    assert accumulated_by(RunningMean) == {"count": False, "mean": False, "history": False, "length": True}
    assert accumulated_by(Meter) == {}
