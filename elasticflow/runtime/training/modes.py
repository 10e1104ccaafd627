"""Training and evaluation mode of a model's modules: each is put back, a frozen BatchNorm in a model that trains as well."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Context in which the models are in evaluation mode; afterwards each of their modules has its previous mode."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # A module's own `train` may do more than set the flag: LoRA layers merge their weights in `eval`, and part them here.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        # Last, since `train` of a module sets the modes of those inside.
        for module, mode in modes:
            module.training = mode
