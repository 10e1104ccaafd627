"""This rank's part of a snapshot: which tensors, and their bytes in the writer's memory (floor R)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticflow import faults
from elasticflow.runtime import tree
from elasticflow.snapshots.staging import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.state import Captured


@dataclass(frozen=True)
class Share:
    """Tensors that one rank stores, in the order of their bytes.

    Attributes:
        tensors: Live tensors by key.
        nbytes: Bytes of all of them.
    """

    tensors: dict[str, Tensor]
    nbytes: int

    def copy_into(self, target: memoryview) -> list[TensorEntry]:
        """Copy the tensors to the start of *target* without gaps; return where each lies."""
        entries, offset = [], 0
        with torch.no_grad():
            for key, tensor in self.tensors.items():
                faults.reach("snapshot.mid_copy")
                shape, size = tuple(tensor.shape), nbytes_of(tensor)
                if size:
                    view_of(target, tensor.dtype, shape, offset).copy_(tensor)
                entries.append(TensorEntry(key, tree.DTYPES[tensor.dtype], shape, offset, size))
                offset += size
        faults.reach("snapshot.after_copy")
        return entries


class Sharing:
    """Who stores what: every rank comes to the same answer without asking the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._sizes: dict[str, int] = {}
        self._keys: list[str] = []

    def share_of(self, captured: Captured) -> Share:
        """Return this rank's share."""
        tensors = captured.tensors
        sizes = {key: nbytes_of(tensor) for key, tensor in tensors.items()}
        if sizes != self._sizes:
            mine = balanced(sizes, self._world_size)[self._rank]
            # The widest first: every tensor is aligned to its own width without gaps between them.
            self._keys = sorted(mine, key=lambda key: (-tensors[key].element_size(), key))
            self._sizes = sizes
        return Share({key: tensors[key] for key in self._keys}, sum(sizes[key] for key in self._keys))


def balanced(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return which keys each of *parts* ranks stores: whole tensors, bytes balanced, the same on every rank."""
    loads = [0] * parts
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


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
