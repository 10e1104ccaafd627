"""The norm of a step's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, as `clip_grad_norm_` computes it."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
