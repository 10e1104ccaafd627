"""What the virtual shards of a step share: buffers that each begins with, gradients that each adds to (floor R)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elasticflow.runtime import buffers

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardBuffers:
    """The model's buffers within a step: each shard begins with the same; BatchNorm's travel with the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.buffers())
        norms = [m for m in model.modules() if isinstance(m, buffers.BATCHNORMS)]
        own = [b for norm in norms for b in norm.buffers(recurse=False)]
        self._means = [b for b in own if b.is_floating_point()]
        self._counters = [b for b in own if not b.is_floating_point()]
        carried = {id(b) for b in own}
        self._others = [b for b in self._all if id(b) not in carried]
        self._before: list[Tensor] = []
        self._first: list[Tensor] = []

    def carried(self) -> list[Tensor]:
        """Return what the layout has to have room for: the statistics, and one number for each counter."""
        return [*self._means, *(c.new_empty((), dtype=torch.float32) for c in self._counters)]

    def begin(self) -> None:
        """Remember what a step begins with."""
        self._before, self._first = [b.clone() for b in self._all], []

    def restore(self) -> None:
        """Put back what the step began with."""
        if self._all:
            torch._foreach_copy_(self._all, self._before)

    def carry(self, views: list[Tensor], *, is_first: bool) -> None:
        """Add what a shard made of them."""
        means = len(self._means)
        if means:
            torch._foreach_add_(views[:means], self._means)
        if is_first:
            was = self._was()
            for view, counter in zip(views[means:], self._counters, strict=True):
                view.add_(counter - was[id(counter)])
            self._first = [b.clone() for b in self._others]

    def carry_nothing(self) -> None:
        """The first shard has no samples: what it would have made of buffers other than BatchNorm's, they were."""
        was = self._was()
        self._first = [was[id(b)] for b in self._others]

    def end(self, views: list[Tensor], shards: float) -> None:
        """Take over what the shards made of them together."""
        self.restore_counters()
        means = len(self._means)
        if means:
            torch._foreach_copy_(self._means, views[:means])
            torch._foreach_div_(self._means, shards)
        for view, counter in zip(views[means:], self._counters, strict=True):
            counter.add_(view.to(counter.dtype))
        if self._first:
            torch._foreach_copy_(self._others, self._first)

    def restore_counters(self) -> None:
        """Put back the counters the step began with."""
        was = self._was()
        for counter in self._counters:
            counter.copy_(was[id(counter)])

    def _was(self) -> dict[int, Tensor]:
        return {id(b): old for b, old in zip(self._all, self._before, strict=True)}


class Additions:
    """Counts how often one backward adds to each gradient: several times if a checkpoint runs it piecemeal."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._counts = [0] * len(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._counter(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    def were_single(self) -> bool:
        """Stop counting; return whether no gradient was added to twice."""
        for handle in self._handles:
            handle.remove()
        return max(self._counts, default=0) <= 1

    def _counter(self, number: int) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            self._counts[number] += 1

        return count
