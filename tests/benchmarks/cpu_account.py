"""CPU time of one thread, told apart by whose code it was spent in."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.training.ddp import DDPStep

P = ParamSpec("P")
R = TypeVar("R")


class Account:
    """CPU time of this thread spent in our code: borders are crossed inwards and outwards, nested at will.

    A border costs time itself, part of it on our side. With `borders` = 2, each one is preceded by one of the same
    kind around nothing, so what is counted then above what is counted with 1 is what the borders cost.

    Attributes:
        borders: 0: nothing is counted; 1: each border stands once; 2: twice.
    """

    def __init__(self) -> None:
        self.borders = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str | None] = [None]
        self._since = 0.0

    def crossing(self, call: Callable[P, R], ours: str | None) -> Callable[P, R]:
        """Return *call* with a border around it: inside is our code, named *ours*, or theirs."""
        nothing = self._bordered(lambda: None, ours)
        within = self._bordered(call, ours)

        def crossed(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self.borders:
                return call(*args, **kwargs)
            if self.borders == 2:
                nothing()
            return within(*args, **kwargs)

        return crossed

    def _bordered(self, call: Callable[P, R], ours: str | None) -> Callable[P, R]:
        def bordered(*args: P.args, **kwargs: P.kwargs) -> R:
            self._tick()
            self._inside.append(ours)
            try:
                return call(*args, **kwargs)
            finally:
                self._tick()
                self._inside.pop()

        return bordered

    def _tick(self) -> None:
        now = time.thread_time()
        inside = self._inside[-1]
        if inside is not None:
            self._seconds[inside] += now - self._since
        self._since = now

    def taken(self) -> dict[str, float]:
        """Return the CPU seconds since the last call, by the name of the border that was crossed last."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def draw_borders(account: Account, group: DDPStep) -> None:
    """Tell torch's code from ours where they call each other inside a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = group._ddp  # torch calls our step module from inside theirs
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.module.forward = account.crossing(wrapped.module.forward, "step module")
    wrapped.forward = account.crossing(wrapped.forward, None)  # type: ignore[method-assign]
    torch.autograd.backward = account.crossing(torch.autograd.backward, None)
    # When its loss goes out of scope the graph and its activations are freed, as in any loop.
    group._backward = account.crossing(group._backward, None)  # type: ignore[method-assign]
