"""Files are read in parallel: every byte arrives once and checked, and damage is told apart from an outage."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import BLOCK, FileEntry
from elasticflow.snapshots.read.stream import VerifiedStream
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"a/empty": 0, "a/byte": 1, "a/block": BLOCK, "b/odd": BLOCK + 5, "b/long": 5 * BLOCK + 17}


def content(path: str) -> bytes:
    """What is in a file: blocks that differ."""
    size = SIZES[path]
    return b"".join(bytes([65 + n]) * BLOCK for n in range(size // BLOCK + 1))[:size]


def entry_of(data: bytes) -> FileEntry:
    """What the manifest would say."""
    return FileEntry(len(data), tuple(zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)))


ENTRIES = {path: entry_of(content(path)) for path in SIZES}


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A store with a few files."""
    made = Storage(str(tmp_path) if request.param == "local" else f"memory://streaming-{tmp_path.name}")
    for path in SIZES:
        made.write(path, [content(path)])
    return made


@pytest.mark.parametrize("integrity", ["crc32", "sha256"])
def test_every_byte_arrives_once(storage: Storage, integrity: str) -> None:
    """What the sink puts together is what is in the files, and progress ends at their sum."""
    entries = ENTRIES
    if integrity == "sha256":
        entries = {p: replace(e, sha256=hashlib.sha256(content(p)).hexdigest()) for p, e in entries.items()}
    found = {path: bytearray(size) for path, size in SIZES.items()}
    arrived, told = [], [0]

    def keep(path: str, offset: int, data: memoryview) -> None:
        arrived.append((path, offset))
        found[path][offset : offset + len(data)] = data

    assert {} == VerifiedStream(storage, entries, sink=keep, progress=told.append).read()
    assert {path: content(path) for path in SIZES} == found
    assert len(set(arrived)) == len(arrived)
    assert sorted(told) == told
    assert sum(SIZES.values()) == told[-1]


def test_all_damage_is_found_at_the_end_or_the_first_ends_it(storage: Storage) -> None:
    """Each damaged file is named with its first damaged block; without `to_the_end`, one of them is enough."""
    long = bytearray(content("b/long"))
    long[4 * BLOCK + 1] ^= 1
    long[2 * BLOCK] ^= 1
    storage.write("b/long", [bytes(long)])
    storage.write("b/odd", [content("b/odd")[:-1]])
    storage.write("a/byte", [b"AA"])
    storage.remove("a/empty")
    expected = {
        "a/byte": "is longer than the 1 bytes that were written",
        "a/empty": "is absent",
        "b/long": f"block 2 (from byte {2 * BLOCK}) is not what was written",
        "b/odd": f"ends at byte {BLOCK + 4}, {BLOCK + 5} bytes were written",
    }
    assert expected == VerifiedStream(storage, ENTRIES, to_the_end=True).read()
    found = VerifiedStream(storage, ENTRIES).read()
    assert found
    assert found.items() <= expected.items()


def test_another_sha256_is_damage(storage: Storage) -> None:
    """Where the entry has a SHA-256, equal CRCs are not enough."""
    entry = replace(ENTRIES["b/odd"], sha256=hashlib.sha256(b"other").hexdigest())
    found = VerifiedStream(storage, {"b/odd": entry}).read()
    assert {"b/odd": "its SHA-256 is not that of what was written"} == found


def test_failing_sink_and_stop_say_nothing_about_the_files(storage: Storage) -> None:
    """When the memory runs out, or nobody wants the bytes any more, reading ends with an error, not with damage."""

    def full(*_: object) -> None:
        raise SnapshotError("no room")

    with pytest.raises(SnapshotError, match=r"^no room$"):
        VerifiedStream(storage, ENTRIES, sink=full).read()
    stream = VerifiedStream(storage, ENTRIES, progress=lambda _: stream.stop())
    with pytest.raises(SnapshotError, match="given up"):
        stream.read()


def test_folder_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    """What a local disk cannot read as a file is damage: a restart would only meet it again."""
    (tmp_path / "x").mkdir()
    found = VerifiedStream(Storage(str(tmp_path)), {"x": entry_of(b"data")}).read()
    assert "cannot be read: IsADirectoryError" in found["x"]
