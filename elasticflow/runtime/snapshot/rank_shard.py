"""This rank's shard of a snapshot: the tensors that the rank stores, and their bytes in staging memory."""

from __future__ import annotations

import ctypes
import heapq
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticflow.runtime.state.tensors import BY_NAME, DTYPES, Copies
from elasticflow.snapshots.format.pieces import Piece
from elasticflow.snapshots.format.shard_file import TensorEntry
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from elasticflow.runtime.process.sharded_tensors import Box
    from elasticflow.runtime.state.state import Captured

# Staging buffers whose views are kept.
_BUFFERS = 8
# Up to 64 ranks each store a part of any size; more ranks store parts only if each part has so many bytes.
_FEW, _WORTH_A_FILE = 64, 16 << 20


class RankShard:
    """Tensors that one rank stores, in the order of their bytes.

    Args:
        tensors: Live tensors by key, of a sharded tensor the local part.
        copies: Keys of tensors that a rank on another node stores.

    Attributes:
        tensors: Live tensors by the key that they are stored under.
        keys: Key of each tensor in the state, by the key that it is stored under: a piece has one of its own.
        entries: Place of each tensor in a staging buffer; the tensors follow one another without gaps.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        frozen: Collection[str] = (),
        boxes: Mapping[str, Box] | None = None,
        copies: Collection[str] = (),
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, str] = {}
        self.entries: list[TensorEntry] = []
        self.nbytes = 0
        for key, tensor in tensors.items():
            size = tensor.nbytes
            dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
            box = (boxes or {}).get(key)
            piece = None if box is None else Piece.of_rows(key, box.shape, box.begin)
            stored = key if piece is None else piece.key
            self.tensors[stored], self.keys[stored] = tensor, key
            entry = TensorEntry(stored, dtype, shape, self.nbytes, size, key in frozen, piece, key in copies)
            self.entries.append(entry)
            self.nbytes += size
        self._buffers: dict[int, _BufferView] = {}

    def copy_into(self, target: memoryview) -> list[TensorEntry]:
        """Copy the tensors to the start of *target*; return `entries`."""
        buffer = self._view(target)
        buffer.first.make()
        fault_injection.reach("snapshot.mid_copy")
        buffer.second.make()
        fault_injection.reach("snapshot.after_copy")
        return self.entries

    def views_in(self, target: memoryview) -> dict[str, Tensor]:
        """Return *target* as tensors by key, without the empty tensors; made once for each buffer."""
        return self._view(target).views

    def forget(self, target: memoryview) -> None:
        """Let go of the views of *target*, which keep its memory mapped."""
        self._buffers.pop(address_of(target), None)

    def _view(self, target: memoryview) -> _BufferView:
        address = address_of(target) if self.nbytes else 0
        buffer = self._buffers.get(address)
        if buffer is None:
            # Views keep the memory of old buffers mapped.
            if len(self._buffers) == _BUFFERS:
                self._buffers.clear()
            views = {
                entry.key: view_of(target, BY_NAME[entry.dtype], entry.shape, entry.offset)
                for entry in self.entries
                if entry.nbytes
            }
            buffer = self._buffers[address] = _BufferView(views, self.tensors)
        return buffer


class _BufferView:
    """A staging buffer as a shard's tensors, and the copies to it in two halves."""

    def __init__(self, views: dict[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        self.views = views
        pairs = [(view, sources[key]) for key, view in views.items()]
        half = len(pairs) // 2
        self.first, self.second = Copies(pairs[:half]), Copies(pairs[half:])


class ShardPlanner:
    """Assigns tensors to ranks: every rank makes the same plan without asking the others.

    Args:
        node: Ranks of this node, if they hold the whole state among themselves: beside its own shard each has copies of
            what ranks on other nodes store.
    """

    def __init__(self, rank: int, world_size: int, node: range | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self._node = range(world_size) if node is None else node
        self._tensors: dict[str, Tensor] | None = None
        self._shard = RankShard({})

    def shard_of(self, captured: Captured) -> RankShard:
        """Return this rank's shard; the same object as before as long as the tensors are the same."""
        tensors = captured.tensors
        if tensors is not self._tensors:
            whole, whole_copies = self._whole_tensors_of(captured)
            pieces, copied_pieces = self._pieces_of(captured)
            copies = {*whole_copies, *copied_pieces}
            # The widest element type comes first: so every tensor is aligned to its own width, without gaps.
            keys = sorted({*whole, *pieces, *copies}, key=lambda key: (-tensors[key].element_size(), key))
            self._tensors, self._shard = (
                tensors,
                RankShard({key: tensors[key] for key in keys}, captured.frozen, captured.boxes, copies),
            )
        return self._shard

    def _whole_tensors_of(self, captured: Captured) -> tuple[list[str], list[str]]:
        """Return the keys of the whole tensors that this rank stores, and of those that it has a copy of."""
        sizes = {key: tensor.nbytes for key, tensor in captured.tensors.items() if key not in captured.boxes}
        plan = balanced(sizes, self._world_size, captured.frozen, captured.local)
        return plan[self._rank], self._copied(dict(enumerate(plan)), sizes)

    def _pieces_of(self, captured: Captured) -> tuple[list[str], list[str]]:
        """Return the keys of the pieces that this rank stores, and of those that it has a copy of.

        The holders of a piece share them, by the sizes of the whole tensors. Those of the job's own objects are all of one
        replica: the first.
        """
        shards = captured.shards
        if not captured.boxes:
            return [], []
        sizes = {
            key: math.prod(box.shape) * captured.tensors[key].element_size()
            for key, box in captured.boxes.items()
        }
        parts = balanced(sizes, len(shards.holders), captured.frozen, captured.local)
        plan = dict(zip(shards.holders, parts, strict=True))
        mine, copied = plan[self._rank], self._copied(plan, sizes)
        own, copies = ([key for key in keys if captured.tensors[key].numel()] for keys in (mine, copied))
        return own, copies

    def _copied(self, plan: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> list[str]:
        """Return the keys that this rank has a copy of: the ranks of its node share what the plan gives to ranks elsewhere."""
        here = [rank for rank in plan if rank in self._node]
        elsewhere = {key: sizes[key] for rank, keys in plan.items() if rank not in self._node for key in keys}
        return _spread(elsewhere, len(here))[here.index(self._rank)]


def balanced(
    sizes: Mapping[str, int], parts: int, frozen: Collection[str] = (), local: Collection[str] = ()
) -> list[list[str]]:
    """Return the keys that each of *parts* ranks stores: whole tensors, bytes balanced, the same plan on every rank.

    If there are many ranks, only some store anything (`_storing_ranks`).

    Args:
        frozen: Keys that are balanced separately, since most snapshots write only the other keys.
        local: Keys whose values may differ between ranks: rank 0 stores its own values, and no rank waits for another.
    """
    ranks = _storing_ranks(sum(sizes.values()), parts)
    of_rank_0 = [key for key in sizes if key in local]
    rest = {key: size for key, size in sizes.items() if key not in local}
    ahead = sum(sizes[key] for key in of_rank_0)
    trained = _spread({key: size for key, size in rest.items() if key not in frozen}, len(ranks), ahead)
    still = _spread({key: size for key, size in rest.items() if key in frozen}, len(ranks))
    trained[0] += of_rank_0
    # In each spread the first rank gets the largest tensor; one list is reversed so that no rank gets both.
    shares = [first + second for first, second in zip(trained, reversed(still), strict=True)]
    if len(ranks) == parts:
        return shares
    keys_of: list[list[str]] = [[] for _ in range(parts)]
    for rank, share in zip(ranks, shares, strict=True):
        keys_of[rank] = share
    return keys_of


def _storing_ranks(nbytes: int, ranks: int) -> list[int]:
    """Return the ranks that store a state of *nbytes* bytes: rank 0, and others as far apart as possible.

    Every node of a group reads every file of a snapshot. If each rank wrote one, a thousand nodes would ask the store for a
    million small files at each start.
    """
    storing = min(ranks, max(_FEW, -(-nbytes // _WORTH_A_FILE)))
    return [number * ranks // storing for number in range(storing)]


def _spread(sizes: Mapping[str, int], parts: int, ahead: int = 0) -> list[list[str]]:
    # Bytes and number of each part, the lightest first.
    loads = [(ahead if part == 0 else 0, part) for part in range(parts)]
    heapq.heapify(loads)
    keys_of: list[list[str]] = [[] for _ in range(parts)]
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + sizes[key], lightest))
        keys_of[lightest].append(key)
    return keys_of


def view_of(data: bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """Return a tensor over *data* from *offset* on; nothing is copied."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)


def address_of(data: memoryview) -> int:
    """Return the address of the first byte of *data*."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
