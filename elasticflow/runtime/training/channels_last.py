"""The channels-last memory format: weights and images with four dimensions, channels innermost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_IMAGES = 4  # dimensions


def to_channels_last(model: nn.Module) -> None:
    """Put parameters and buffers with four dimensions into the channels-last format, and such inputs of each later forward.

    Tensors with other numbers of dimensions stay as they are (`nn.Module.to(memory_format=...)` fails on five). Call it before
    optimizer, average and replicas are made: their tensors take over the format. Values do not change; kernels for this format
    may add in another order.

    Args:
        model: On its device. Tensors among the arguments of its forward are converted, also inside of tuples, lists and dicts.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == _IMAGES:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    model.register_forward_pre_hook(_convert, with_kwargs=True)


def _convert(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _converted(args), _converted(kwargs)


def _converted(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_image = value.dim() == _IMAGES
        return value.contiguous(memory_format=torch.channels_last) if is_image else value
    # Subclasses, such as namedtuples and batches of transformers, may be made in another way.
    if type(value) in (tuple, list):
        return type(value)(map(_converted, value))
    if type(value) is dict:
        return {key: _converted(each) for key, each in value.items()}
    return value
