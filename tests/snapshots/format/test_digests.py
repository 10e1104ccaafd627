"""What is taken while writing is checked while reading: every changed, missing or surplus byte is noticed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.snapshot_settings import Integrity  # noqa: TC001  # hypothesis reads annotations
from elasticflow.snapshots.format.digests import Checksums, Verifier
from elasticflow.snapshots.format.manifest import BLOCK, DamagedSnapshotError, FileEntry

both = pytest.mark.parametrize("integrity", ["crc32", "sha256"])
cuts = st.lists(st.integers(0, 2 * BLOCK + 5), max_size=5).map(sorted)


def pieces(data: bytes, at: list[int]) -> list[memoryview]:
    """*data* cut at these places."""
    view = memoryview(data)
    return [view[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def entry_of(data: bytes, integrity: Integrity, at: list[int] | None = None) -> FileEntry:
    """What the manifest would say."""
    sums = Checksums(integrity)
    for _ in sums.through(pieces(data, at or [])):
        pass
    return sums.entry()


def check(data: bytes, entry: FileEntry, at: list[int] | None = None) -> None:
    """Read *data* as the file of *entry*."""
    verifier = Verifier(entry)
    for piece in pieces(data, at or []):
        verifier.feed(piece)
    verifier.finish()


@both
@settings(max_examples=10, deadline=None)
@given(st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]), cuts, cuts)
def test_pieces_do_not_matter(integrity: Integrity, size: int, written: list[int], read: list[int]) -> None:
    """However the bytes are cut while writing and reading, the entry is the same and the file is good."""
    data = bytes(size)
    entry = entry_of(data, integrity, [min(c, size) for c in written])
    assert entry_of(data, integrity) == entry
    assert (size, -(-size // BLOCK)) == (entry.size, len(entry.crc32))
    assert (hashlib.sha256(data).hexdigest() if integrity == "sha256" else None) == entry.sha256
    check(data, entry, [min(c, size) for c in read])


@both
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2 * BLOCK + 4), st.integers(1, 255))
def test_a_changed_byte_is_found_in_its_block(integrity: Integrity, place: int, change: int) -> None:
    """The message names the block and where it begins."""
    data = bytearray(2 * BLOCK + 5)
    entry = entry_of(bytes(data), integrity)
    data[place] = change
    block = place // BLOCK
    with pytest.raises(DamagedSnapshotError) as caught:
        check(bytes(data), entry)
    assert caught.value.message == f"block {block} (from byte {block * BLOCK}) is not what was written"


@both
def test_other_lengths_are_refused(integrity: Integrity) -> None:
    """Too short and too long are told apart, and an empty file is one like any other."""
    entry = entry_of(b"abcdef", integrity)
    with pytest.raises(DamagedSnapshotError, match="ends at byte 4, 6 bytes were written"):
        check(b"abcd", entry)
    with pytest.raises(DamagedSnapshotError, match="longer than the 6 bytes"):
        check(b"abcdefg", entry)
    with pytest.raises(DamagedSnapshotError, match="longer than the 0 bytes"):
        check(b"a", entry_of(b"", integrity))


def test_sha256_finds_what_crc32_cannot() -> None:
    """Content forged to the same CRC-32 is told by the SHA-256 alone."""
    good, forged = entry_of(b"plumless", "sha256"), b"buckeroo"  # a known collision of CRC-32
    assert entry_of(forged, "crc32") == entry_of(b"plumless", "crc32")
    with pytest.raises(DamagedSnapshotError, match="SHA-256"):
        check(forged, good)
