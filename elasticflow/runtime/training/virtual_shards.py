"""What the virtual shards of a step share: buffers that each begins with, gradients that each adds to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elasticflow.errors import StateError
from elasticflow.runtime.model import model_buffers
from elasticflow.runtime.process.torch_private import foreach_copy_, foreach_div_

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardBuffers:
    """The model's buffers within a step: each shard begins with the same; BatchNorm's travel with the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.buffers())
        norms = [m for m in model.modules() if isinstance(m, model_buffers.BATCHNORMS)]
        own = [b for norm in norms for b in norm.buffers(recurse=False)]
        self._means = [b for b in own if b.is_floating_point()]
        self._counters = [b for b in own if not b.is_floating_point()]
        carried = {id(b) for b in own}
        self._others = [b for b in self._all if id(b) not in carried]
        self._before: list[Tensor] = []
        self._first: list[Tensor] = []

    def begin(self) -> None:
        """Remember what a step begins with."""
        self._before, self._first = [b.clone() for b in self._all], []

    def restore(self) -> None:
        """Put back what the step began with."""
        if self._all:
            foreach_copy_(self._all, self._before)

    def carried(self, *, is_first: bool) -> list[Tensor]:
        """Return what a shard made of them: the statistics, and by how much the first shard raised each counter."""
        raised = [b.new_zeros((), dtype=torch.float32) for b in self._counters]
        if is_first and self._before:
            was = self._was()
            for number, counter in zip(raised, self._counters, strict=True):
                number.copy_(counter - was[id(counter)])
            self._first = [b.clone() for b in self._others]
        return [*(b.clone() for b in self._means), *raised]

    def carry_nothing(self) -> None:
        """The first shard has no samples: what it would have made of buffers other than BatchNorm's, they were."""
        was = self._was()
        self._first = [was[id(b)] for b in self._others]

    def end(self, totals: list[Tensor], shards: float) -> None:
        """Take over what the shards made of them together."""
        self._restore_counters()
        means = len(self._means)
        if means:
            foreach_copy_(self._means, totals[:means])
            foreach_div_(self._means, shards)
        for total, counter in zip(totals[means:], self._counters, strict=True):
            counter.add_(total.to(counter.dtype))
        if self._first:
            foreach_copy_(self._others, self._first)

    def _was(self) -> dict[int, Tensor]:
        return {id(b): old for b, old in zip(self._all, self._before, strict=True)}

    def _restore_counters(self) -> None:
        was = self._was()
        for counter in self._counters:
            counter.copy_(was[id(counter)])


class EarlyBuckets:
    """Hands on buckets of gradients while a backward still makes others.

    A backward may add to a gradient several times (checkpoints that run it piecemeal). Where one did, nothing more is
    handed on early: nobody knows when such a gradient is whole.

    Args:
        parameters: Whose gradients.
        buckets: Indices of *parameters*, in the order in which they are to be handed on.
        hand_on: Called with a bucket's gradients, which are its own from then on.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        buckets: list[list[int]],
        hand_on: Callable[[list[Tensor | None]], None],
    ) -> None:
        self._parameters, self._buckets, self._hand_on = parameters, buckets, hand_on
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._seen: set[int] = set()
        self._has_looked = self._is_piecemeal = self._is_open = False
        self._gone = 0
        for index in self._bucket_of:
            parameters[index].register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def begin(self, *, is_last: bool) -> None:
        """Get ready for a backward.

        Args:
            is_last: What it makes may be handed on.
        """
        self._seen.clear()
        self._gone = 0
        self._is_open = is_last and self._has_looked and not self._is_piecemeal

    def end(self) -> set[int]:
        """Stop; return the indices of the gradients that were handed on since `begin`."""
        self._is_open = False
        # A shard whose loss counts nothing has no backward.
        self._has_looked = self._has_looked or bool(self._seen)
        return {index for bucket in self._buckets[: self._gone] for index in bucket}

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._arrived(index)

    def _arrived(self, index: int) -> None:
        if index in self._seen:
            self._is_piecemeal, self._is_open = True, False
            if self._bucket_of[index] < self._gone:
                raise StateError(
                    "a backward added to a gradient again after it was complete in every backward before",
                    "use checkpoint(..., use_reentrant=False)",
                )
        self._seen.add(index)
        while self._is_open and self._gone < len(self._buckets):
            bucket = self._buckets[self._gone]
            if not self._seen.issuperset(bucket):
                return
            self._gone += 1
            gradients = [self._parameters[p].grad for p in bucket]
            for p in bucket:
                self._parameters[p].grad = None
            self._hand_on(gradients)
