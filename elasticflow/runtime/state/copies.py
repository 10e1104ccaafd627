"""Copies of tensors, worked out once for many times: naming a small tensor takes torch longer than copying it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from elasticflow.runtime.torch_private import foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_SMALL = 256 << 10  # bytes; torch copies what is larger as fast, and with several threads


class Copies:
    """Copies of tensors to tensors, as long as none of them moves in memory.

    Args:
        pairs: Target and source, alike in shape.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._pairs = list(pairs)  # keeps their memory
        plain = [_is_plain(target, source) for target, source in self._pairs]
        self._bytes = [
            (_bytes_of(t), _bytes_of(s))
            for (t, s), is_plain in zip(self._pairs, plain, strict=True)
            if is_plain
        ]
        rest = [pair for pair, is_plain in zip(self._pairs, plain, strict=True) if not is_plain]
        self._targets, self._sources = [target for target, _ in rest], [source for _, source in rest]

    def make(self) -> None:
        """Copy; on a CUDA device when its stream comes to it."""
        for target, source in self._bytes:
            target[:] = source
        copy(self._targets, self._sources)


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors in one call: many small ones take longer to name than to copy."""
    if targets:
        with torch.no_grad():
            foreach_copy_(targets, sources)


def _is_plain(target: Tensor, source: Tensor) -> bool:
    """True if the bytes of *source* are what belongs into *target*."""
    return (
        0 < target.nbytes <= _SMALL
        and target.dtype is source.dtype
        and all(
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            for tensor in (target, source)
        )
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    # Not `tensor.numpy()`: its storage could not be resized from then on, and it may be the job's.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
