"""The forms in which a training step may return its loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elasticflow.errors import StepResultError
from elasticflow.runtime.data import notes

FORMS = (
    "a step returns the loss, a mean over the samples; (loss_sum, count); or a dict with `loss`, where it is a mean over "
    "other items than the samples their `count`, and whatever scalars are to be logged"
)
HALVES = frozenset({torch.float16, torch.bfloat16})


class StepLoss(NamedTuple):
    """The loss of a training step.

    Attributes:
        value: A sum over `num_items`; without them, a mean over the samples. None if it is a mean over no items,
            which is not a number: it counts for nothing.
        num_items: Number of items in the sum, such as tokens without padding; the sum of their weights if weighted. A tensor
            if it lies on a device: NaN if it is negative, which `require_count` refuses once the number is here.
    """

    value: Tensor | None
    num_items: float | Tensor | None


def parse_loss(result: Any) -> StepLoss:
    """Return the loss that a training step returned; a mean over counted items becomes their sum.

    A count beside a sum stays on its device. A count beside a mean is read, and the host waits for it: the mean over no items
    is not a number, and neither are its gradients, so such a mean must have no backward.

    Raises:
        StepResultError: it has none of the forms that a step may return.
    """
    if isinstance(result, Tensor):
        return StepLoss(_scalar(result), None)
    if isinstance(result, dict):
        if "loss" not in result:
            raise _refused(f"a dict without `loss` (its keys are {', '.join(map(str, result)) or 'none'})")
        mean, count = result["loss"], result.get("count")
        if not isinstance(mean, Tensor):
            raise _refused(f"a dict whose `loss` is a {type(mean).__name__}", _of_no_tensor(mean))
        if count is None:
            return StepLoss(_scalar(mean), None)
        number = _number_of(count)
        if number == 0:
            return StepLoss(None, 0.0)
        # Half precision would overflow at 65,504.
        return StepLoss((_scalar(mean).float() if mean.dtype in HALVES else _scalar(mean)) * number, number)
    if isinstance(result, tuple | list):
        return _of_pair(result)
    raise _refused(f"a {type(result).__name__}", _of_no_tensor(result))


def require_count(number: float, where: str) -> None:
    """Raise unless *number* can be a sum of counts, which `parse_loss` leaves on their device, and so cannot check.

    Args:
        where: Where the counts were returned, for the message: "step 7".

    Raises:
        StepResultError: a count was negative or not finite.
    """
    if not 0 <= number < math.inf:
        raise _refused(
            f"a negative or infinite count of its loss in {where}", "a count is a number from 0 on"
        )


def with_count(result: Any, count: Any) -> dict[str, Any]:
    """Return a training step's *result* as a dict whose `loss` is a mean over *count* items.

    Raises:
        StepResultError: the step counts for itself already, or did not return a loss.
    """
    if isinstance(result, Tensor):
        return {"loss": result, "count": count}
    if isinstance(result, dict) and "count" not in result:
        return {**result, "count": count}
    parse_loss(result)
    raise StepResultError(
        "the training step returned a count beside its loss, and model.loss_count counts too",
        "leave model.loss_count out, or let the step return the mean alone",
    )


def _of_pair(result: tuple[Any, ...] | list[Any]) -> StepLoss:
    """Return the loss out of (loss_sum, count)."""
    is_sum = isinstance(result[0], Tensor) and _is_number(result[0]) if result else False
    if is_sum and len(result) == 2 and _is_number(result[1]):
        return StepLoss(_scalar(result[0]), _count_of(result[1]))
    scalars = [n for n, each in enumerate(result) if isinstance(each, Tensor) and each.dim() == 0]
    hint = None
    if len(scalars) == 1:
        hint = f"return the loss alone, item {scalars[0]} of this, without logits and the like"
    raise _refused(notes.form(tuple(result)), hint)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dim() <= 1
    return not isinstance(value, dict | list | tuple | str) and hasattr(value, "__float__")


def _scalar(loss: Tensor) -> Tensor:
    if loss.dim() and loss.numel() != 1:
        raise _refused(
            f"{notes.form(loss)} as its loss",
            "a loss is one number: return its mean(), or (its sum(), how many items it is over)",
        )
    return loss


def _count_of(count: Any) -> float | Tensor:
    """Return the count of a sum: as a tensor if it is on a device, without waiting for the device."""
    if not isinstance(count, Tensor) or count.device.type == "cpu":
        return _number_of(count)
    number = count.detach().reshape(()).float()
    return number.where(number >= 0, math.nan)


def _number_of(count: Any) -> float:
    if not _is_number(count):
        raise _refused(f"{notes.form(count)} as the count of its loss", "a count is one number")
    number = float(count)
    if not 0 <= number < math.inf:
        raise _refused(f"{number} as the count of its loss", "a count is a number from 0 on")
    return number


def _of_no_tensor(value: Any) -> str | None:
    if isinstance(value, int | float):
        return "a number cannot be differentiated: return the tensor, without float() or item()"
    return None


def _refused(what: str, hint: str | None = None) -> StepResultError:
    return StepResultError(
        f"the training step returned {what}", FORMS if hint is None else f"{hint}; {FORMS}"
    )
