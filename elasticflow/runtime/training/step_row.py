"""The numbers of one step that all ranks add up: in one exchange they learn its loss, its scalars and all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from elasticflow.runtime.process import host_copies
from elasticflow.runtime.process.votes import NUM_REQUESTS
from elasticflow.runtime.training.scalars import NUM_PLACES

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_REQUESTS = (0.0,) * NUM_REQUESTS
_SCALARS = 2 + NUM_REQUESTS
ROW_SIZE = _SCALARS + NUM_PLACES


def row_dtype() -> torch.dtype:
    """Return the dtype of rows on a device: torch's default, or single precision where that would round counts."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class StepRow(NamedTuple):
    """A rank's or a virtual shard's part of a step; sums over several have the same form.

    Attributes:
        loss: Sum of the losses times their weights.
        num_items: Number of items that the loss is a sum over; 0 if the step does not count them.
        scalars: Weighted sum and weight of each scalar, by place; in a part there may be fewer than there are places.
        extra: Numbers of one kind of step only.
    """

    loss: Any
    num_items: float | Tensor
    requests: Sequence[float] = NO_REQUESTS
    scalars: Sequence[Any] = ()
    extra: Sequence[float] = ()

    def to_numbers(self, places: int = NUM_PLACES) -> list[float]:
        """Return the row as numbers; a tensor counts as 0."""
        loss = 0.0 if isinstance(self.loss, Tensor) else self.loss
        num_items = 0.0 if isinstance(self.num_items, Tensor) else self.num_items
        scalars = [0.0 if isinstance(number, Tensor) else number for number in self.scalars]
        padding = [0.0] * (places - len(scalars))
        return [loss, num_items, *self.requests, *scalars, *padding, *self.extra]

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the row's numbers on *device*, by default of `row_dtype`; the host does not wait for the device."""
        numbers = host_copies.to_device(self.to_numbers(), device, dtype or row_dtype())
        if isinstance(self.loss, Tensor):
            numbers[0] = self.loss
        if isinstance(self.num_items, Tensor):
            numbers[1] = self.num_items
        for place, number in enumerate(self.scalars, _SCALARS):
            if isinstance(number, Tensor):
                numbers[place] = number
        return numbers

    @classmethod
    def from_sums(cls, sums: Sequence[float], places: int = NUM_PLACES) -> StepRow:
        """Return the row whose numbers are *sums*."""
        end = _SCALARS + places
        return cls(sums[0], sums[1], sums[2:_SCALARS], sums[_SCALARS:end], sums[end:])
