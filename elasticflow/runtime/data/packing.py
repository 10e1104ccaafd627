"""Values of tensors as bytes, and back: the same objects in whatever process and on whatever device they were made."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any, *, keeps_classes: bool = False) -> io.BytesIO:
    """Return a value of tensors as a file in memory: a pickle, each plain tensor with its own elements only.

    Args:
        keeps_classes: Tensors of classes of their own are pickled as these do it.

    Raises:
        TypeError: something in it cannot be pickled.
        ValueError: the same.
        AttributeError: the same, of a local object.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, keeps_classes=keeps_classes).dump(value)
    except pickle.PicklingError as error:
        raise ValueError(str(error)) from error
    return buffer


def unpacked(data: memoryview | bytes) -> Any:
    """Return the packed value; its tensors are contiguous copies on the CPU."""
    return pickle.loads(data)  # noqa: S301  # a rank of this worker group packed it


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, *, keeps_classes: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._keeps_classes = keeps_classes

    # A view would take its whole storage along, and a tensor of a GPU would want that GPU where it is unpacked.
    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor if self._keeps_classes else isinstance(value, Tensor)
        if not is_plain or value.layout is not torch.strided:
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        # A buffer is copied once on its way into the pickle, and once out of it, into memory that can be written.
        content = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
        return _tensor, (pickle.PickleBuffer(content), plain.dtype, tuple(plain.shape))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
