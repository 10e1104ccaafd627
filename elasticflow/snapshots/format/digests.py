"""Digests of a file, taken while it is written and checked while it is read."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING

from elasticflow.snapshots.format.manifest import BLOCK, DamagedSnapshotError, FileEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.protocol.snapshot_settings import Integrity


class Checksums:
    """CRC-32 of each BLOCK of a stream of bytes; with `sha256` also the SHA-256 of all bytes.

    Attributes:
        size: Bytes so far.
        blocks: CRC-32 of each block that has begun.
    """

    def __init__(self, integrity: Integrity = "crc32") -> None:
        self.size = 0
        self.blocks: list[int] = []
        self._sha256 = hashlib.sha256() if integrity == "sha256" else None

    def through(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield *parts*, cut at the borders of blocks, and add them to the checksums."""
        for part in parts:
            rest = part
            while len(rest):
                room = BLOCK - self.size % BLOCK
                piece, rest = rest[:room], rest[room:]
                if room == BLOCK:
                    self.blocks.append(0)
                self.blocks[-1] = zlib.crc32(piece, self.blocks[-1])
                if self._sha256 is not None:
                    self._sha256.update(piece)
                self.size += len(piece)
                yield piece

    def entry(self) -> FileEntry:
        """Return the manifest's entry for the bytes so far."""
        sha256 = None if self._sha256 is None else self._sha256.hexdigest()
        return FileEntry(size=self.size, crc32=tuple(self.blocks), sha256=sha256)


class Verifier:
    """Checks the bytes of one file, in order, against the manifest's entry.

    Args:
        first: Number of the first block to be checked.
        count: Number of blocks to check; None: all from *first* on. The SHA-256 is checked only if these are all blocks.
    """

    def __init__(self, entry: FileEntry, first: int = 0, count: int | None = None) -> None:
        self._entry = entry
        self._start = first * BLOCK
        self._end = entry.size if count is None else min(entry.size, (first + count) * BLOCK)
        is_whole = first == 0 and self._end == entry.size
        self._sha256 = entry.sha256 if is_whole else None
        self._sums = Checksums("crc32" if self._sha256 is None else "sha256")

    def feed(self, part: memoryview) -> None:
        """Check the next bytes, block by block.

        Raises:
            DamagedSnapshotError: a block is not what was written, or there are more bytes than were written.
        """
        for _ in self._sums.through([part]):
            at = self._start + self._sums.size
            if at > self._end:
                raise DamagedSnapshotError(f"is longer than the {self._end} bytes that were written")
            if at % BLOCK == 0 or at == self._end:
                self._check_block((at - 1) // BLOCK)

    def finish(self) -> None:
        """Raise if the file is not whole.

        Raises:
            DamagedSnapshotError: the file is too short, or its SHA-256 differs.
        """
        if (at := self._start + self._sums.size) < self._end:
            raise DamagedSnapshotError(f"ends at byte {at}, {self._entry.size} bytes were written")
        if self._sums.entry().sha256 != self._sha256:
            raise DamagedSnapshotError("its SHA-256 is not that of what was written")

    def _check_block(self, number: int) -> None:
        if self._entry.crc32[number : number + 1] != (self._sums.blocks[-1],):
            raise DamagedSnapshotError(f"block {number} (from byte {number * BLOCK}) is not what was written")
