"""Parts of a snapshot's files, read once, verified, and handed to their receivers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.read.snapshot_stream import SnapshotStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.snapshots.format.pieces import Span
    from elasticflow.snapshots.format.state_json import Ref
    from elasticflow.snapshots.tools.exported import Export

    Take = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class TensorSlice:
    """Bytes that are wanted: a stored tensor or one element of it.

    Attributes:
        spans: Where they lie, in their order; files are paths in the storage.
    """

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(span.nbytes for span in self.spans)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 if there is none."""
        return self.nbytes // max(1, math.prod(self.shape)) or 1


def slice_of(export: Export, ref: Ref) -> TensorSlice:
    """Return the place of the tensor."""
    whole, folder = export.manifest.whole[ref.key], export.catalog.folder()
    begin, end, shape = 0, whole.nbytes, whole.shape
    if ref.index is not None:
        size = whole.nbytes // math.prod(whole.shape)
        begin, end, shape = ref.index * size, (ref.index + 1) * size, ()
    spans = tuple(
        span._replace(file=f"{folder}/{export.manifest.location(span.file)}")
        for span in whole.spans(begin, end)
    )
    return TensorSlice(spans, whole.dtype, shape)


def copy(export: Export, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
    """Read the files that hold the pieces, verify all of them, and hand each piece's bytes over.

    Args:
        wanted: Pieces, each with a receiver that takes an offset in the piece and bytes; called from several threads.

    Raises:
        DamagedSnapshotError: a file is not what was written; the bytes handed over so far are worthless then.
        SnapshotError: the store cannot be read.
        OSError: a receiver raised it.
    """
    catalog, manifest = export.catalog, export.manifest
    handing = _Distributor(wanted)
    stream = SnapshotStream(catalog, manifest, handing.paths, sink=handing, progress=export.progress)
    try:
        damage = stream.read()
    except SnapshotError:
        if handing.failure is not None:
            raise handing.failure from None
        raise
    for text in damage:
        raise DamagedSnapshotError(
            f"snapshot {manifest.name} is damaged: {text}", "export another: elasticflow snapshots list"
        )


class _Wanted(NamedTuple):
    """Bytes of a file that a receiver wants, and their offset in its piece."""

    span: Span
    offset: int
    take: Take


class _Distributor:
    """Finds the pieces that a stretch of a file holds, and hands them its bytes."""

    def __init__(self, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
        self._wanted: dict[str, list[_Wanted]] = defaultdict(list)
        for piece, take in wanted:
            offset = 0
            for span in piece.spans:
                self._wanted[span.file].append(_Wanted(span, offset, take))
                offset += span.nbytes
        for of_file in self._wanted.values():
            of_file.sort(key=lambda each: each.span.offset)
        # Tensors do not overlap, so their ends are in the same order.
        self._ends = {
            path: [span.offset + span.nbytes for span, _, _ in of_file]
            for path, of_file in self._wanted.items()
        }
        self.failure: OSError | None = None

    @property
    def paths(self) -> set[str]:
        """The files that hold something wanted."""
        return set(self._wanted)

    def __call__(self, path: str, offset: int, data: memoryview) -> None:
        """Hand over the wanted parts of *data*, at *offset* of the file."""
        end = offset + len(data)
        for span, begin, take in self._wanted[path][bisect_right(self._ends[path], offset) :]:
            if span.offset >= end:
                break
            first, last = max(offset, span.offset), min(end, span.offset + span.nbytes)
            try:
                take(begin + first - span.offset, data[first - offset : last - offset])
            except OSError as error:
                self.failure = error
                raise
