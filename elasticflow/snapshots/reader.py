"""Reading a snapshot back, every byte checked against the manifest while it streams in (floor 1)."""

from __future__ import annotations

import errno
import json
import zlib
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.manifest import BLOCK, STATE_FILE, DamagedSnapshotError, FileEntry, Manifest

if TYPE_CHECKING:
    from typing import BinaryIO

    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.storage import Storage

_BAD_PLACE = (errno.EIO, errno.EISDIR, errno.ENOTDIR)


def read_shard(storage: Storage, path: str, entry: FileEntry) -> bytearray:
    """Return the verified content of a file; tensors lie in it at the manifest's offsets.

    Raises:
        DamagedSnapshotError: the file is absent, of another size, unreadable, or a block of it is not what was
            written; says which.
        SnapshotError: the store could not be reached, which says nothing about the snapshot.
    """
    content = bytearray(entry.size)
    _read(storage, path, entry, memoryview(content))
    return content


def read_state(catalog: Catalog, manifest: Manifest) -> dict[str, Any]:
    """Return the verified content of state.json.

    Raises:
        DamagedSnapshotError: as `read_shard`.
    """
    entry = manifest.files.get(STATE_FILE)
    if entry is None:
        raise DamagedSnapshotError(f"{STATE_FILE} is not in the manifest")
    content = read_shard(catalog.storage, f"{catalog.folder(manifest.name)}/{STATE_FILE}", entry)
    state: dict[str, Any] = json.loads(bytes(content))
    return state


def verify(catalog: Catalog, manifest: Manifest) -> list[str]:
    """Return what is wrong with the snapshot's files, one line each; empty if every byte is what was written.

    Raises:
        SnapshotError: as `read_shard`.
    """
    problems = []
    scratch = memoryview(bytearray(BLOCK))
    for name, entry in manifest.files.items():
        try:
            _read(catalog.storage, f"{catalog.folder(manifest.name)}/{name}", entry, scratch)
        except DamagedSnapshotError as error:
            problems.append(error.message)
    return problems


def _read(storage: Storage, path: str, entry: FileEntry, target: memoryview) -> None:
    """Read and check *path* into *target*, which has room for the whole file or for one block."""
    name = path.rpartition("/")[2]
    try:
        with storage.open_read(path) as file:
            for number, expected in enumerate(entry.crc32):
                start = number * BLOCK
                place = target[start : start + BLOCK] if len(target) >= entry.size else target
                _read_block(file, place[: entry.size - start], number, expected)
            more = bool(file.read(1))
    except FileNotFoundError:
        raise DamagedSnapshotError(f"{name}: is absent") from None
    except DamagedSnapshotError as error:
        raise DamagedSnapshotError(f"{name}: {error.message}") from None
    except Exception as error:
        # A disk that cannot read this very place is damage; anything else may pass, and says nothing about the file.
        is_bad_place = storage.is_local and isinstance(error, OSError) and error.errno in _BAD_PLACE
        kind = DamagedSnapshotError if is_bad_place else SnapshotError
        raise kind(f"{name}: cannot be read: {type(error).__name__}: {error}") from error
    if more:
        raise DamagedSnapshotError(f"{name}: is longer than the {entry.size} bytes that were written")


def _read_block(file: BinaryIO, place: memoryview, number: int, expected: int) -> None:
    done = 0
    while done < len(place) and (size := file.readinto(place[done:])):  # type: ignore[attr-defined]
        done += size
    start = number * BLOCK
    if done < len(place):
        raise DamagedSnapshotError(
            f"ends at byte {start + done}, block {number} has {len(place)} bytes from {start}"
        )
    if zlib.crc32(place) != expected:
        raise DamagedSnapshotError(f"block {number} (from byte {start}) is not what was written")
