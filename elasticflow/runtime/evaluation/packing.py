"""Outputs and targets of one batch as bytes, and back: the same objects on whatever rank and device they were made."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> memoryview:
    """Return a value of tensors as writable bytes: a pickle, each plain tensor with its own elements only.

    Raises:
        TypeError: something in it cannot be pickled.
        ValueError: the same.
        AttributeError: the same, of a local object.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except pickle.PicklingError as error:
        raise ValueError(str(error)) from error
    return buffer.getbuffer()


def unpacked(data: memoryview) -> Any:
    """Return the packed value; its tensors are contiguous copies on the CPU."""
    return pickle.loads(data)  # noqa: S301  # a rank of this worker group packed it


class _Pickler(pickle.Pickler):
    # A view would take its whole storage along, and a tensor of a GPU would want that GPU where it is unpacked.
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _tensor, (content, plain.dtype, tuple(plain.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
