"""Tensors for snapshots: supported kinds, layout in memory, fast copies of many."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of
from elasticflow.runtime.process.torch_private import foreach_copy_, storage_id
from elasticflow.snapshots.format import pieces

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, dtype.torch_name): name for name, dtype in pieces.DTYPES.items()
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

# Followed by the dimensions, the one with the widest stride first.
_PERMUTED = "permuted:"
# Bytes; torch copies what is larger as fast, and with several threads.
_SMALL = 256 << 10

Identity = tuple[int | tuple[int, int], torch.dtype, torch.Size, tuple[int, ...], str, bool, bool]


def refusal(tensor: Tensor, *, in_place: bool) -> tuple[str, str | None] | None:
    """Return reason and remedy, as texts, if a snapshot cannot hold *tensor*; None if it can.

    Args:
        in_place: Restoring copies into it, which takes memory of its own for each element.
    """
    if is_sharded(tensor):
        tensor = local_of(tensor)  # how it is cut is looked at where it is captured
    if is_lazy(tensor):
        return "a parameter without a shape", "run one forward on made-up data where the model is built"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}", None
    if tensor.is_nested:
        return "a nested tensor", "keep a padded tensor and the lengths"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})", "keep tensor.int_repr(), scale and zero point"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout})", "keep its indices and values"
    if tensor.is_meta:
        return "a tensor on the meta device, without values", "give it values before training starts"
    if tensor.dtype not in DTYPES:
        remedy = "keep torch.view_as_real(tensor)" if tensor.is_complex() else None
        return f"a tensor of {tensor.dtype}", remedy
    if in_place and _overlaps_itself(tensor):
        return "an expanded tensor, whose elements share memory", "register tensor.contiguous() instead"
    return None


def identity_of(tensor: Tensor) -> Identity:
    """Return a key that is equal for two tensors if and only if they have the same elements in the same memory."""
    shape = tensor.shape
    address: int | tuple[int, int]
    if is_sharded(tensor):
        tensor = local_of(tensor)
        # A rank may hold no element of it, and so no memory. Storages tell tied tensors on every rank alike.
        address = storage_id(tensor), int(tensor.storage_offset())
    else:
        address = tensor.data_ptr()
    return (
        address,
        tensor.dtype,
        shape,
        tensor.stride(),
        str(tensor.device),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def layout_of(tensor: Tensor) -> str | None:
    """Return how a tensor lies in memory if it is dense and not contiguous, else None."""
    if tensor.is_contiguous():
        return None
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return _PERMUTED + ",".join(map(str, order)) if tensor.permute(order).is_contiguous() else None


def copy_with_layout(tensor: Tensor, layout: str | None) -> Tensor:
    """Return a copy of a contiguous tensor that lies as `layout_of` said.

    Raises:
        StateError: the layout was written by another version.
    """
    match layout:
        case None:
            return tensor.clone()
        case "channels_last":
            return tensor.clone(memory_format=torch.channels_last)
        case "channels_last_3d":
            return tensor.clone(memory_format=torch.channels_last_3d)
        case str() if layout.startswith(_PERMUTED):
            order = [int(dim) for dim in layout.removeprefix(_PERMUTED).split(",")]
            inverse = [order.index(dim) for dim in range(len(order))]
            return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
        case _:
            raise StateError(
                f"the snapshot holds a tensor laid out as {layout}, which this version does not know"
            )


class Copies:
    """Copies of tensors to tensors, worked out once for many times, as long as none of them moves in memory.

    Naming a small tensor takes torch longer than copying it.

    Args:
        pairs: Target and source, of one shape.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # Kept, so that their memory is.
        self._pairs = list(pairs)
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


def _overlaps_itself(tensor: Tensor) -> bool:
    # The farthest element of the dimensions looked at.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
