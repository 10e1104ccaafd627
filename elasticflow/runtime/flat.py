"""Many tensors as stretches of one per dtype, so that they are added and sent together (floor R)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layout:
    """Where each of several tensors lies in flat ones, one for each dtype; padded so that all ranks own as much.

    Args:
        tensors: What is to lie in them: shapes, dtypes and the device; their values do not matter.
        parts: Every flat tensor can be cut into so many equal slices.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int) -> None:
        self._device = tensors[0].device
        self._places: list[tuple[torch.dtype, int, Tensor]] = []
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            offset = sizes.setdefault(tensor.dtype, 0)
            self._places.append((tensor.dtype, offset, tensor))
            sizes[tensor.dtype] = offset + tensor.numel()
        self._sizes = {dtype: -(-size // parts) * parts for dtype, size in sizes.items()}

    def new(self) -> Flat:
        """Return new flat tensors of noughts."""
        flats = {
            dtype: torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in self._sizes.items()
        }
        views = [_view(flats[dtype], offset, like) for dtype, offset, like in self._places]
        return Flat(list(flats.values()), views)


class Flat:
    """One set of flat tensors.

    Attributes:
        tensors: One for each dtype.
        views: The tensors of the layout, in its order, as views.
    """

    def __init__(self, tensors: list[Tensor], views: list[Tensor]) -> None:
        self.tensors, self.views = tensors, views

    def add(self, other: Flat) -> Flat:
        """Add *other* to this one and return it."""
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            mine.add_(its)
        return self

    def clear(self) -> None:
        """Make everything nought."""
        for tensor in self.tensors:
            tensor.zero_()


def _view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    piece = flat[offset : offset + like.numel()]
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape  # a gradient lies as its parameter does, or torch copies it
        return piece.view(n, h, w, c).permute(0, 3, 1, 2)
    return piece.view(like.shape)
