"""Learning-rate schedules with a warm-up, for `lr_scheduler.entry` of a job file.

Each schedule rises linearly over `warmup` steps to the optimizer's own rate, and falls to `final` times that rate after
`total` steps, where it stays. The schedules are torch's `LambdaLR`: every parameter group keeps its own rate, and
snapshots hold the step. torch is imported when a schedule is made, so that this module can be imported without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, *, warmup: int, total: int, final: float = 0.0) -> LambdaLR:
    """Return a schedule that rises linearly, and then falls along half a cosine.

    Args:
        optimizer: Optimizer whose rates the schedule sets.
        warmup: Steps of the rise; its step n has n / (warmup + 1) of the full rate, so that no step is lost at a rate
            of 0.
        total: Steps after which the rate stays at *final*. With `lr_scheduler.interval = "epoch"` both numbers count epochs.
        final: Final rate, as a part of the full rate; 0.1 for a tenth.

    Raises:
        ValueError: a number is out of its range.
    """
    _check(warmup=warmup, total=total, final=final)
    return _scheduled(optimizer, warmup, lambda step: _fallen("cosine", step - warmup, total - warmup, final))


def warmup_linear(optimizer: Optimizer, *, warmup: int, total: int, final: float = 0.0) -> LambdaLR:
    """Return a schedule that rises linearly, then falls linearly; the arguments are those of `warmup_cosine`.

    Raises:
        ValueError: a number is out of its range.
    """
    _check(warmup=warmup, total=total, final=final)
    return _scheduled(optimizer, warmup, lambda step: _fallen("linear", step - warmup, total - warmup, final))


def warmup_stable_decay(
    optimizer: Optimizer,
    *,
    warmup: int,
    total: int,
    decay: int,
    final: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> LambdaLR:
    """Return a schedule that rises linearly, stays at the full rate, and falls over its last *decay* steps (WSD).

    Args:
        optimizer: Optimizer whose rates the schedule sets.
        warmup: Steps of the rise, as in `warmup_cosine`.
        total: Steps after which the rate stays at *final*.
        decay: Steps of the fall, the last steps of *total*.
        final: Final rate, as a part of the full rate.
        shape: Shape of the fall: linear, cosine, or sqrt (one minus the square root of the elapsed part).

    Raises:
        ValueError: a number is out of its range, or *shape* is unknown.
    """
    _check(warmup=warmup, total=total, final=final, decay=decay)
    if shape not in {"linear", "cosine", "sqrt"}:
        raise ValueError(f'shape must be "linear", "cosine" or "sqrt", not {shape!r}')
    return _scheduled(optimizer, warmup, lambda step: _fallen(shape, step - total + decay, decay, final))


def _check(*, warmup: Any, total: Any, final: float, decay: Any = 0) -> None:
    for name, value in (("warmup", warmup), ("total", total), ("decay", decay)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number of steps, at least 0, not {value!r}")
    if warmup + decay > total:
        both = f"warmup + decay = {warmup + decay}" if decay else f"warmup = {warmup}"
        raise ValueError(f"{both} is more than total = {total}: no step would have the full rate")
    if not 0 <= final <= 1:
        raise ValueError(f"final must be from 0 to 1, a part of the full rate, not {final!r}")


def _scheduled(optimizer: Optimizer, warmup: int, after_warmup: Callable[[int], float]) -> LambdaLR:
    from torch.optim.lr_scheduler import LambdaLR

    def part(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else after_warmup(step)

    # This is a function, not an object: snapshots hold none of its numbers, so the numbers of the job file count at
    # each start.
    return LambdaLR(optimizer, part)


def _fallen(shape: str, step: int, steps: int, final: float) -> float:
    """Return the share of the full rate that is left *step* steps after the start of a fall over *steps* steps."""
    over = 1.0 if step >= steps else 0.0 if step <= 0 else step / steps
    left = {"linear": 1 - over, "cosine": (1 + math.cos(math.pi * over)) / 2, "sqrt": 1 - math.sqrt(over)}
    return final + (1 - final) * left[shape]
