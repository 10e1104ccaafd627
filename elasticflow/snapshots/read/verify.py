"""Reads files of a snapshot back, or only verifies them, against its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.manifest import STATE_FILE, DamagedSnapshotError, FileEntry, Manifest
from elasticflow.snapshots.read.snapshot_stream import SnapshotStream
from elasticflow.snapshots.read.stream import VerifiedStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.storage.storage import Storage


def read_shard(storage: Storage, path: str, entry: FileEntry) -> bytearray:
    """Return the verified content of a file.

    Raises:
        DamagedSnapshotError: the file is absent, of another size, unreadable, or a block of it is not what was
            written; the text says which.
        SnapshotError: the store could not be reached, which says nothing about the snapshot.
    """
    content = bytearray(entry.size)
    target = memoryview(content)

    def keep(_: str, offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    for damage in VerifiedStream(storage, {path: entry}, sink=keep).read().values():
        raise DamagedSnapshotError(f"{path.rpartition('/')[2]}: {damage}")
    return content


def read_state(catalog: Catalog, manifest: Manifest) -> dict[str, Any]:
    """Return the verified content of state.json.

    Raises:
        DamagedSnapshotError: as `read_shard`, and as `state_json.parse`.
        SnapshotError: as `read_shard`.
    """
    entry = manifest.files.get(STATE_FILE)
    if entry is None:
        raise DamagedSnapshotError(f"{STATE_FILE} is not in the manifest")
    content = read_shard(catalog.storage, f"{catalog.folder(manifest.name)}/{STATE_FILE}", entry)
    return state_json.parse(bytes(content), manifest.whole)


def verify(catalog: Catalog, manifest: Manifest, progress: Callable[[int], None] | None = None) -> list[str]:
    """Return a line for each file, the snapshot's own or borrowed, that is damaged; empty: the snapshot is whole.

    Nothing is kept in memory but a block per thread, and the headers.

    Args:
        progress: Called with the bytes read so far, from one thread at a time.

    Raises:
        SnapshotError: as `read_shard`.
    """
    return SnapshotStream(catalog, manifest, progress=progress, to_the_end=True).read()
