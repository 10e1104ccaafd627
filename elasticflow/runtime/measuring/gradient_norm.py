"""The norm of a step's gradient, without waiting for the device that computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class LateNumber:
    """A number that a GPU is about to compute, on its way to this side; `float()` of it waits until it is here.

    Args:
        number: On the GPU.
    """

    def __init__(self, number: Tensor) -> None:
        self._here = torch.empty_like(number, device="cpu", pin_memory=True)
        self._here.copy_(number, non_blocking=True)
        self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrival.record(torch.cuda.current_stream(number.device))

    def __float__(self) -> float:
        """Return it, as soon as it is here."""
        self._arrival.synchronize()
        return self._here.item()


def read_late(number: Tensor) -> float | LateNumber:
    """Return a tensor's only value; nothing waits for a GPU before it is asked for."""
    return LateNumber(number.detach()) if number.device.type == "cuda" else float(number)


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, as `clip_grad_norm_` computes it."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
