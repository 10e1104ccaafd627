"""This rank's part of a snapshot: which tensors, and their bytes in the writer's memory."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticflow import fault_injection
from elasticflow.runtime.state import tensors as storable
from elasticflow.runtime.state.copies import Copies
from elasticflow.snapshots.format.shard_file import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from elasticflow.runtime.state.state import Captured

_BUFFERS = 8  # staging buffers whose views are kept


class Share:
    """Tensors that one rank stores, in the order of their bytes.

    Attributes:
        tensors: Live tensors by key.
        nbytes: Bytes of all of them.
        entries: Where each lies in a staging buffer: one after the other, without gaps.
    """

    def __init__(self, tensors: dict[str, Tensor], frozen: Collection[str] = ()) -> None:
        self.tensors = tensors
        self.entries: list[TensorEntry] = []
        self.nbytes = 0
        for key, tensor in tensors.items():
            size = nbytes_of(tensor)
            dtype, shape = storable.DTYPES[tensor.dtype], tuple(tensor.shape)
            self.entries.append(TensorEntry(key, dtype, shape, self.nbytes, size, key in frozen))
            self.nbytes += size
        self._places: dict[int, _Place] = {}

    def copy_into(self, target: memoryview) -> list[TensorEntry]:
        """Copy the tensors to the start of *target*; return where each lies."""
        place = self._place(target)
        place.first.make()
        fault_injection.reach("snapshot.mid_copy")
        place.second.make()
        fault_injection.reach("snapshot.after_copy")
        return self.entries

    def views_in(self, target: memoryview) -> dict[str, Tensor]:
        """Return *target* as tensors by key, those without elements left out; made once for each buffer."""
        return self._place(target).views

    def _place(self, target: memoryview) -> _Place:
        address = address_of(target) if self.nbytes else 0
        place = self._places.get(address)
        if place is None:
            if len(self._places) == _BUFFERS:  # they keep the memory mapped
                self._places.clear()
            views = {
                entry.key: view_of(target, storable.BY_NAME[entry.dtype], entry.shape, entry.offset)
                for entry in self.entries
                if entry.nbytes
            }
            place = self._places[address] = _Place(views, self.tensors)
        return place


class _Place:
    """A staging buffer as a share sees it."""

    def __init__(self, views: dict[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        self.views = views
        pairs = [(view, sources[key]) for key, view in views.items()]
        half = len(pairs) // 2
        self.first, self.second = Copies(pairs[:half]), Copies(pairs[half:])


class Sharing:
    """Who stores what: every rank comes to the same answer without asking the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._of: dict[str, Tensor] | None = None
        self._share = Share({})

    def share_of(self, captured: Captured) -> Share:
        """Return this rank's share; the same object as before as long as the tensors are the same."""
        tensors = captured.tensors
        if tensors is not self._of:
            sizes = {key: nbytes_of(tensor) for key, tensor in tensors.items()}
            mine = balanced(sizes, self._world_size, captured.frozen, captured.local)[self._rank]
            # The widest first: every tensor is aligned to its own width without gaps between them.
            keys = sorted(mine, key=lambda key: (-tensors[key].element_size(), key))
            self._of, self._share = tensors, Share({key: tensors[key] for key in keys}, captured.frozen)
        return self._share


def balanced(
    sizes: Mapping[str, int], parts: int, frozen: Collection[str] = (), local: Collection[str] = ()
) -> list[list[str]]:
    """Return which keys each of *parts* ranks stores: whole tensors, bytes balanced, the same on every rank.

    The *frozen* ones are shared out by themselves: most snapshots write only the others. The *local* ones are rank
    0's, which count: so no rank waits for another to make them equal.
    """
    own = [key for key in sizes if key in local]
    rest = {key: size for key, size in sizes.items() if key not in local}
    ahead = sum(sizes[key] for key in own)
    moving = _spread({key: size for key, size in rest.items() if key not in frozen}, parts, ahead)
    still = _spread({key: size for key, size in rest.items() if key in frozen}, parts)
    moving[0] += own
    # The largest of a kind goes to the first: in turn from both ends, no rank gets two of them.
    return [ours + theirs for ours, theirs in zip(moving, reversed(still), strict=True)]


def _spread(sizes: Mapping[str, int], parts: int, ahead: int = 0) -> list[list[str]]:
    loads = [ahead, *[0] * (parts - 1)]
    found: list[list[str]] = [[] for _ in range(parts)]
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[key]
        found[lightest].append(key)
    return found


def view_of(data: bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """Return a tensor over *data* from *offset* on; nothing is copied."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)


def address_of(data: memoryview) -> int:
    """Return where *data* begins in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
