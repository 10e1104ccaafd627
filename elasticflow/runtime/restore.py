"""Finding the newest snapshot that every rank can read (floor R)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import events, faults
from elasticflow.errors import SnapshotError, StorageError
from elasticflow.runtime import tree
from elasticflow.runtime.order import Position
from elasticflow.runtime.share import view_of
from elasticflow.snapshots import reader
from elasticflow.snapshots.manifest import STATE_FILE, DamagedSnapshotError

if TYPE_CHECKING:
    from torch import Tensor

    from elasticflow.runtime.member import Worker
    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.snapshots.manifest import Manifest

_OUTAGE = "outage: "


@dataclass(frozen=True)
class Found:
    """A snapshot read and verified on every rank: its manifest, the content of state.json, its tensors."""

    manifest: Manifest
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def newest_good(me: Worker, catalog: Catalog) -> Found | None:
    """Return the newest snapshot that all ranks read and verified, or None if there is none. Collective: every rank.

    One that any rank finds damaged is set aside with the reason, and all go on to the next older one.

    Raises:
        SnapshotError: the storage cannot be read on this rank or another.
    """
    for name in _candidates(me, catalog):
        found, problem = None, ""
        faults.reach("restore.before_read")
        try:
            found, problem = read(catalog, name)
        except (OSError, SnapshotError, StorageError) as error:
            problem = _OUTAGE + _text(error)
        problems = [text for text in _told_by_all(me, problem) if text]
        if not problems:
            return found
        if me.rank == 0:
            _set_aside(me, catalog, name, problems[0])
        me.barrier()
    return None


def _candidates(me: Worker, catalog: Catalog) -> list[str]:
    """Return the committed snapshots, newest first, as rank 0 sees them: a listing can differ between nodes."""
    text = ""
    if me.rank == 0:
        try:
            for name, reason in catalog.damaged().items():
                _set_aside(me, catalog, name, reason)
            text = "\n".join(manifest.name for manifest in catalog.committed())
        except (OSError, StorageError) as error:
            text = _OUTAGE + _text(error)
    return _told_by_all(me, text)[0].split()


def _told_by_all(me: Worker, text: str) -> list[str]:
    """Return every rank's *text*.

    Raises:
        SnapshotError: one of them tells of an outage, which says nothing about any snapshot.
    """
    texts = me.gather_text(text)
    for rank, told in enumerate(texts):
        if told.startswith(_OUTAGE):
            raise SnapshotError(f"rank {rank} cannot read snapshots: {told.removeprefix(_OUTAGE)}")
    return texts


def position_of(content: dict[str, Any]) -> Position:
    """Return the position that state.json states."""
    return Position(**content)


def read(catalog: Catalog, name: str) -> tuple[Found | None, str]:
    """Return the snapshot, every byte of it verified, or what is damaged.

    Raises:
        OSError: the storage cannot be read, which says nothing about the snapshot.
        SnapshotError: the same.
    """
    try:
        manifest = catalog.manifest(name)
        state = reader.read_state(catalog, manifest)
        folder = catalog.folder()
        shards = {
            file: reader.read_shard(catalog.storage, f"{folder}/{manifest.location(file)}", entry)
            for file, entry in (manifest.files | manifest.borrowed).items()
            if file != STATE_FILE
        }
    except (DamagedSnapshotError, FileNotFoundError, ValueError) as error:
        return None, _text(error)
    tensors = {
        key: view_of(shards[place.file], tree.BY_NAME[place.dtype], place.shape, place.offset)
        for key, place in manifest.tensors.items()
    }
    return Found(manifest, state, tensors), ""


def _text(error: Exception) -> str:
    return getattr(error, "message", None) or f"{type(error).__name__}: {error}"


def _set_aside(me: Worker, catalog: Catalog, name: str, reason: str) -> None:
    catalog.quarantine(name, reason)
    me.event(events.SNAPSHOT_REJECTED, level="warning", name=name, reason=reason)
