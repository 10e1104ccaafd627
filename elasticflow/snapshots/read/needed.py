"""The bytes of a snapshot that a node needs: all of them, or of tensors in pieces only the rows that its ranks hold.

Checksums are of whole blocks, so whole blocks are read. A file that also has a SHA-256 is read to its end or not at all. All nodes
together need every byte: no part of a snapshot goes unverified when the group resumes from it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from elasticflow.snapshots.format.manifest import BLOCK
from elasticflow.snapshots.format.pieces import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.format.pieces import Part, WholeTensor

Partly = dict[str, frozenset[int]]
"""Numbers of the blocks to read of files, by location (`Manifest.location`); a file that is not named is read whole."""


def needed_blocks(manifest: Manifest, parts: Collection[Part] | None) -> Partly:
    """Return the files that are not read whole by ranks that hold *parts* of sharded tensors, and the blocks to read of them.

    Args:
        parts: The parts that ranks of the node hold. None: everything is needed.
    """
    if parts is None:
        return {}
    needed: defaultdict[str, set[int]] = defaultdict(set)
    for whole in manifest.whole.values():
        for span in _spans(whole, parts):
            needed[span.file].update(blocks_of(span))
    begins: dict[str, int] = {}
    for place in manifest.tensors.values():
        begins[place.file] = min(place.offset, begins.get(place.file, place.offset))
    files, partly = manifest.files | manifest.borrowed, {}
    for file, begin in begins.items():
        blocks, entry = needed[file], files[file]
        if blocks:
            # The header, which is compared with the manifest.
            blocks.update(blocks_of(Span(file, 0, begin)))
        if len(blocks) < len(entry.crc32) and not (blocks and entry.sha256 is not None):
            partly[manifest.location(file)] = frozenset(blocks)
    return partly


def blocks_of(span: Span) -> range:
    """Return the numbers of the blocks that *span* lies in."""
    return range(span.offset // BLOCK, -(-(span.offset + span.nbytes) // BLOCK))


def nbytes_of(manifest: Manifest, partly: Mapping[str, Collection[int]]) -> int:
    """Return the bytes to read of the snapshot's files."""
    total = 0
    for location, entry in manifest.locations().items():
        blocks = partly.get(location)
        if blocks is None:
            total += entry.size
        else:
            total += sum(min(BLOCK, entry.size - number * BLOCK) for number in blocks)
    return total


def _spans(whole: WholeTensor, parts: Collection[Part]) -> Iterator[Span]:
    if whole.pieces[0].piece is None:
        yield from whole.spans(0, whole.nbytes)
        return
    row = whole.nbytes // whole.shape[0]
    for part in parts:
        begin, end = part.rows(whole.shape[0])
        yield from whole.spans(begin * row, end * row)
