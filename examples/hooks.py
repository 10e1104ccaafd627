"""Hooks for examples/mnist.py: what a run shows of itself while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from elasticflow.runtime.loop.context import HookContext


def first_layer(context: HookContext) -> None:
    """Log the weights of the first layer as an image, the largest white."""
    weight = next(
        module.weight for module in context.model.modules() if isinstance(module, nn.Conv2d | nn.Linear)
    )
    rows = weight.flatten(1)
    context.log_image("first_layer", (rows - rows.min()) / (rows.max() - rows.min()))


def weight_norms(context: HookContext, at_most: int = 20) -> None:
    """Log the norm of each parameter."""
    for name, parameter in list(context.model.named_parameters())[:at_most]:
        context.log_scalar(f"norm/{name}", parameter.norm())
