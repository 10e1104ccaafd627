"""Forwards by autocast to bf16 or fp16, and in evaluation mode, after which each module has its own mode again."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a forward on *device* runs."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


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
