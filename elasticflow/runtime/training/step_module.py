"""One forward of the user's step with what all ranks settle beside it: what DistributedDataParallel wraps."""

from __future__ import annotations

from ctypes import c_float
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticflow import StopTraining
from elasticflow.runtime.process import stopping
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.training.loss import parse_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.training.loss_weights import FirstLook

# The ballot: weighted loss, items counted by the user's step, changed buffers, generators drawn from, and the
# wishes of `vote`.
LOSS, SIZE = 0, 4 + len(Vote().wishes())


class StepModule(nn.Module):
    """The user's step on the bare model, and the ballot.

    Args:
        me: This worker.
        model: Bare.
        step: The user's.
        scaler: For fp16.
        is_synced: Forwards of all ranks wait for each other.

    Attributes:
        first_look: Called with what the user's step returned; only in the first step of a run.
    """

    def __init__(
        self,
        me: Worker,
        model: nn.Module,
        step: Callable[[nn.Module, Any], Any],
        scaler: GradScaler | None,
        *,
        is_synced: bool,
    ) -> None:
        super().__init__()
        self._is_synced = is_synced
        self.model = model
        self.ballot = nn.Parameter(torch.zeros(SIZE))
        self.tally = _Tally()
        self.first_look: FirstLook | None = None
        self._call, self._world_size, self._scaler, self._vote = step, me.world_size, scaler, me.vote
        self._is_here = me.device.type == "cpu"
        self._values = torch.zeros(SIZE)
        # Written without torch's bookkeeping: read in the same step only. What a float cannot hold becomes inf.
        memory: Any = self._values.numpy()
        self._array: Any = (c_float * SIZE).from_buffer(memory)

    def forward(
        self, data: Any, count: int, total: int, wishes: Callable[[], tuple[float, ...]] | None
    ) -> tuple[Tensor, ...]:
        """Return what to differentiate: the loss and, with *wishes*, what casts the ballot."""
        loss = None
        if data is not None:
            try:
                loss = self._loss(data, count, total)
            except StopTraining as stop:
                if self._is_synced:
                    raise  # other ranks wait for this one within their forwards
                stopping.want(self._vote, stop)
        if loss is None:
            loss = _nothing(self.model)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if wishes is None:
            return (loss,)
        # The gradient of this dot product by the ballot is what this rank votes.
        return loss, torch.dot(self.ballot, self._votes(wishes()))

    def _loss(self, data: Any, num_samples: int, total: int) -> Tensor | None:
        result = self._call(self.model, data)
        if self.first_look is not None:
            self.first_look(result, data, num_samples)
        loss, count = parse_loss(result)
        weight = num_samples / total
        if count is not None:
            weight = 1.0
            self.tally.count += count
        if loss is None:
            return None
        self.tally.loss += (loss.item() if self._is_here else loss.detach().float()) * weight
        weight *= self._world_size
        return loss if weight == 1.0 else loss * weight

    def _votes(self, wishes: tuple[float, ...]) -> Tensor:
        if self._is_here:
            self._array[:] = [self.tally.loss, self.tally.count, *wishes]
            return self._values
        self._array[:] = [0.0, self.tally.count, *wishes]
        values = self._values.to(self.ballot.device)
        values[LOSS] = self.tally.loss  # stays on the device: nothing waits for it here
        return values


class _Tally:
    """What this rank has of the step so far: weighted loss, and items if the user's step counts them."""

    loss: float | Tensor
    count: float

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.loss, self.count = 0.0, 0.0


def _nothing(model: nn.Module) -> Tensor:
    # An empty slice: gradients are zeros of the right shape even where a weight is not finite. The order of
    # the sum makes the gradients ready in the order a real backward has: last layer first.
    parts = [(p if p.dim() else p.reshape(1))[:0].sum() for p in model.parameters() if p.requires_grad]
    loss = parts[0].float()
    for part in parts[1:]:
        loss = loss + part
    return loss
