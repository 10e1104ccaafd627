"""Tensors of a verified snapshot, read when they are asked for (floor R)."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from elasticflow.runtime import storable
from elasticflow.runtime.share import view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.snapshots.loaded import Loaded

_CHUNK = 64 << 20  # bytes that are given back to the system together, when the last tensor in them is gone
_ALIGNED = 64  # what vector instructions like


class Fresh(Mapping[str, Tensor]):
    """Each look reads the tensor anew, contiguous, into memory of its own: whoever looked may keep it.

    Raises:
        SnapshotError: at a look, if the tensor's file changed since it was verified, or cannot be read.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._places = loaded.manifest.tensors
        self._room = memoryview(b"")
        self._left = sum(map(_taken_by, (place.nbytes for place in self._places.values())))

    def __getitem__(self, key: str) -> Tensor:
        """Read the tensor."""
        place = self._places[key]
        target = self._memory(place.nbytes)
        self._loaded.read_into(key, target)
        return view_of(target, storable.BY_NAME[place.dtype], place.shape, 0)

    def __iter__(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self._places)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._places)

    def _memory(self, nbytes: int) -> memoryview:
        """Return memory never used before; in large pages, since the first touch of each page is most of a load."""
        taken = _taken_by(nbytes)
        if taken > len(self._room):
            size = max(taken, min(_CHUNK, self._left))
            chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                chunk.madvise(mmap.MADV_HUGEPAGE)
            self._room = memoryview(chunk)
        found, self._room = self._room[:nbytes], self._room[taken:]
        self._left -= taken
        return found


def _taken_by(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
