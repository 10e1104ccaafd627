"""Reading a snapshot back, every byte checked against the manifest while it streams in (floor 1)."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.digests import Verifier
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
    for location, entry in manifest.locations().items():
        try:
            _read(catalog.storage, f"{catalog.folder()}/{location}", entry, scratch)
        except DamagedSnapshotError as error:
            lender = "" if location not in manifest.borrowed else f"{location.partition('/')[0]}/"
            problems.append(lender + error.message)
    return problems


def _read(storage: Storage, path: str, entry: FileEntry, target: memoryview) -> None:
    """Read and check *path* into *target*, which has room for the whole file or for one block."""
    name = path.rpartition("/")[2]
    verifier = Verifier(entry)
    try:
        with storage.open_read(path) as file:
            for start in range(0, entry.size, BLOCK):
                place = target[start : start + BLOCK] if len(target) >= entry.size else target
                verifier.feed(_fill(file, place[: entry.size - start]))
            verifier.finish()
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


def _fill(file: BinaryIO, place: memoryview) -> memoryview:
    done = 0
    while done < len(place) and (size := file.readinto(place[done:])):  # type: ignore[attr-defined]
        done += size
    return place[:done]
