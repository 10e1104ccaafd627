"""What a training step may return, and what becomes of a loss that is not finite (floor R)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elasticflow import events
from elasticflow.errors import NonFiniteLossError

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from elasticflow.runtime.member import Worker


def parse_loss(result: Any) -> tuple[Tensor, float | None]:
    """Return the loss a training step returned and, if it is a sum, over how many.

    Raises:
        TypeError: it is none of the forms that a step may return.
    """
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, tuple) and len(result) == 2:
        loss, count = result
        return loss, float(count)
    if isinstance(result, dict) and isinstance(result.get("loss"), Tensor):
        return result["loss"], None
    raise TypeError(
        f"the training step returned a {type(result).__name__}: it must return a loss, (loss_sum, count) or a dict with `loss`"
    )


class NonFinite:
    """What becomes of a step whose loss is not finite.

    Args:
        me: This worker.
        action: "stop" or "skip".
        parameters: Those that are trained.
        scaler: Of fp16.
    """

    def __init__(
        self, me: Worker, action: str, parameters: list[nn.Parameter], scaler: GradScaler | None
    ) -> None:
        self._me, self._action, self._parameters, self._scaler = me, action, parameters, scaler

    def refuse(self, number: int, loss: float) -> None:
        """Have step *number* change nothing.

        Raises:
            NonFiniteLossError: the action is "stop".
        """
        if self._action == "stop":
            raise NonFiniteLossError(
                f"the loss of step {number} is {loss}",
                'look at the data and the learning rate; train.on_nonfinite = "skip" leaves such steps out',
            )
        if self._me.rank == 0:
            self._me.event(events.LOSS_SKIPPED, level="warning", step=number, loss=str(loss))
        for parameter in self._parameters:
            if self._scaler is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill_(math.nan)  # what makes the scaler leave the step out
