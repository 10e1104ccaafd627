"""Parts of a snapshot's files, read once, verified, and handed to their receivers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.read.stream import VerifiedStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.snapshots.format.state_json import Ref
    from elasticflow.snapshots.tools.exported import Export

    Take = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class TensorSlice:
    """Bytes that are wanted: a stored tensor or one element of it.

    Attributes:
        path: File in the storage.
        offset: First byte in the file.
        nbytes: Number of bytes.
        dtype: Name of the dtype in safetensors.
        shape: Shape of the tensor.
    """

    path: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 if there is none."""
        return self.nbytes // max(1, math.prod(self.shape)) or 1


def slice_of(export: Export, ref: Ref) -> TensorSlice:
    """Return the place of the tensor."""
    place = export.manifest.tensors[ref.key]
    path = f"{export.catalog.folder()}/{export.manifest.location(place.file)}"
    whole = TensorSlice(path, place.offset, place.nbytes, place.dtype, place.shape)
    if ref.index is None:
        return whole
    size = whole.itemsize
    return TensorSlice(path, place.offset + ref.index * size, size, place.dtype, ())


def copy(export: Export, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
    """Read the files that hold the pieces, verify all of them, and hand each piece's bytes over.

    Args:
        export: The choice of what to export.
        wanted: Pieces, each with a receiver that takes an offset in the piece and bytes; called from several threads.

    Raises:
        DamagedSnapshotError: a file is not what was written; the bytes handed over so far are worthless then.
        SnapshotError: the store cannot be read.
        OSError: a receiver raised it.
    """
    catalog, manifest = export.catalog, export.manifest
    files, handing = verify.needed_files(catalog, manifest), _Distributor(wanted)
    needed = {path: files[path] for path in handing.paths}
    try:
        damage = VerifiedStream(catalog.storage, needed, sink=handing, progress=export.progress).read()
    except SnapshotError:
        if handing.failure is not None:
            raise handing.failure from None
        raise
    for text in verify.describe_damage(catalog, manifest, damage):
        raise DamagedSnapshotError(
            f"snapshot {manifest.name} is damaged: {text}", "export another: elasticflow snapshots list"
        )


class _Distributor:
    """Finds the pieces that a stretch of a file holds, and hands them its bytes."""

    def __init__(self, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
        self._pieces: dict[str, list[tuple[TensorSlice, Take]]] = defaultdict(list)
        for piece, take in sorted(wanted, key=lambda pair: pair[0].offset):
            if piece.nbytes:
                self._pieces[piece.path].append((piece, take))
        # Tensors do not overlap, so their ends are in the same order.
        self._ends = {path: [p.offset + p.nbytes for p, _ in found] for path, found in self._pieces.items()}
        self.failure: OSError | None = None

    @property
    def paths(self) -> list[str]:
        """The files that hold something wanted."""
        return list(self._pieces)

    def __call__(self, path: str, offset: int, data: memoryview) -> None:
        """Hand over the wanted parts of *data*, at *offset* of the file."""
        end = offset + len(data)
        for piece, take in self._pieces[path][bisect_right(self._ends[path], offset) :]:
            if piece.offset >= end:
                break
            first, last = max(offset, piece.offset), min(end, piece.offset + piece.nbytes)
            try:
                take(first - piece.offset, data[first - offset : last - offset])
            except OSError as error:
                self.failure = error
                raise
