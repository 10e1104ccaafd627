"""CPU time of one thread, told apart by whose code it was spent in."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.replicas import DataParallel

P = ParamSpec("P")
R = TypeVar("R")


class Account:
    """CPU time of this thread spent in our code: borders are crossed inwards and outwards, nested at will.

    Attributes:
        is_open: Time is counted; else a border costs a tenth of a microsecond.
        seconds: CPU seconds by the name of the border that was crossed last.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str | None] = [None]
        self._since = 0.0

    def crossing(self, call: Callable[P, R], ours: str | None) -> Callable[P, R]:
        """Return *call* with a border around it: inside is our code, named *ours*, or theirs."""

        def crossed(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self.is_open:
                return call(*args, **kwargs)
            self._tick()
            self._inside.append(ours)
            try:
                return call(*args, **kwargs)
            finally:
                self._tick()
                self._inside.pop()

        return crossed

    def _tick(self) -> None:
        now = time.thread_time()
        inside = self._inside[-1]
        if inside is not None:
            self.seconds[inside] += now - self._since
        self._since = now


def draw_borders(account: Account, group: DataParallel) -> None:
    """Tell torch's code from ours where they call each other inside a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = group._ddp  # torch calls our step module from inside theirs
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.module.forward = account.crossing(wrapped.module.forward, "step module")
    wrapped.forward = account.crossing(wrapped.forward, None)  # type: ignore[method-assign]
    torch.Tensor.backward = account.crossing(torch.Tensor.backward, None)  # type: ignore[method-assign]
    # When its loss goes out of scope the graph and its activations are freed, as in any loop.
    group._backward = account.crossing(group._backward, None)  # type: ignore[method-assign]
