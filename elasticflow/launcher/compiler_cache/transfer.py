"""Moves a node's cache to its archive beside the snapshots, or from there: `python -m elasticflow.launcher.compiler_cache.transfer`.

A process of its own: libraries for stores are large, and what goes wrong here must end no run. It reads one line of JSON
and writes one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.errors import ElasticflowError, SnapshotError
from elasticflow.launcher.compiler_cache.node_folder import NodeFolder
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage
from elasticflow.system import atomic_files
from elasticflow.system.machine import MachineKind
from elasticflow.system.processes import die_with_parent
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping


# Workers wait for a cache that is loaded; no one waits for one that is saved.
_LOAD_PATIENCE, _SAVE_PATIENCE = Patience(total_s=15.0), Patience()
_IDLE = 19
MOST_BYTES = 1 << 30
"""Of all files of a cache: more is not put beside the snapshots."""
_FORMAT = 1
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in an archive: equal files make equal archives
_TRIES = 2


Action = Literal["load", "save"]
Outcome = Literal["loaded", "saved", "none", "busy", "failed"]


@dataclass(frozen=True)
class Transfer:
    """A request to load or save.

    Attributes:
        parent: Process whose end also ends this one.
        is_first: The node has rank 0; others save only where there is no cache of their kind.
    """

    action: Action
    parent: int
    folder: str
    kind: str
    facts: dict[str, str]
    uri: str
    prefix: str
    options: dict[str, Any]
    is_first: bool = False


@dataclass(frozen=True)
class Transferred:
    """Result of a request.

    Attributes:
        outcome: `none`: there was nothing to do; `busy`: a compiler is writing, so try again.
    """

    outcome: Outcome
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


class BadArchiveError(SnapshotError):
    """The archive beside the snapshots is damaged; the text says how."""


def pack(folder: Path, names: Mapping[str, int]) -> bytes:
    """Return an archive of the files *names* in *folder*."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in sorted(names):
            archive.writestr(
                zipfile.ZipInfo(name, _EPOCH), (folder / name).read_bytes(), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> dict[str, int]:
    """Put the files of an archive into *folder*, each whole or not at all; return their sizes by name.

    Raises:
        BadArchiveError: *data* is no archive, or holds no cache; nothing was written then.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise BadArchiveError(f"it is no archive: {error}") from None
    with archive:
        entries = archive.infolist()
        for entry in entries:
            path = PurePosixPath(entry.filename)
            if path.is_absolute() or ".." in path.parts or entry.is_dir():
                raise BadArchiveError(f"it holds {entry.filename}")
        if (size := sum(entry.file_size for entry in entries)) > MOST_BYTES:
            raise BadArchiveError(f"it holds {size} bytes")
        for entry in entries:
            target = folder / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            # A power cut may leave an empty file: the seal, written last, says which are whole.
            atomic_files.replace(target, (archive.read(entry),), 0o777, sync=False)
    return {entry.filename: entry.file_size for entry in entries}


@dataclass(frozen=True)
class Stored:
    """A cache that lies beside the snapshots."""

    data: bytes
    files: int


class CacheStore:
    """The caches beside the snapshots of a run, one for each kind of machine.

    `compiler/<kind>.json` names the archive and its digest; it is replaced in one act, once the archive is there.
    """

    def __init__(self, storage: Storage, prefix: str, kind: MachineKind) -> None:
        self._storage, self._kind = storage, kind
        self._folder = f"{prefix}compiler"
        self._record = f"{self._folder}/{kind.name}.json"

    def has_one(self) -> bool:
        """Return whether there is a cache for this kind of machine."""
        return self._storage.exists(self._record)

    def load(self) -> Stored | None:
        """Return the cache for this kind of machine, every byte verified; None if there is none.

        Raises:
            BadArchiveError: the archive is not what was written.
            OSError: the store does not answer.
        """
        for tries_left in reversed(range(_TRIES)):
            record = self._read_record()
            if record is None:
                return None
            try:
                data = self._storage.read(f"{self._folder}/{record['archive']}")
            except FileNotFoundError:
                # Another node may have replaced it since the record was read.
                if tries_left:
                    continue
                raise BadArchiveError(f"{record['archive']} is gone") from None
            if hashlib.sha256(data).hexdigest() != record["sha256"]:
                raise BadArchiveError(f"{record['archive']} is not what was written: its SHA-256 differs")
            return Stored(data, int(record["files"]))
        raise AssertionError

    def save(self, data: bytes, files: Mapping[str, int]) -> None:
        """Make the archive *data* the cache for this kind of machine; an older one is removed.

        Raises:
            OSError: the store does not take it; the older one is still there.
        """
        try:
            older = self._read_record()
        except BadArchiveError:
            older = None
        digest = hashlib.sha256(data).hexdigest()
        name = f"{self._kind.name}-{digest[:16]}.zip"
        record = {
            "format": _FORMAT,
            "archive": name,
            "sha256": digest,
            "bytes": len(data),
            "files": len(files),
            "created": time.time(),
            "machine": self._kind.facts,
        }
        self._storage.write(f"{self._folder}/{name}", [data])
        self._storage.write(self._record, [json.dumps(record, indent=1).encode()])
        if older is not None and older["archive"] != name:
            self._storage.remove(f"{self._folder}/{older['archive']}")

    def _read_record(self) -> dict[str, Any] | None:
        try:
            record = parse(self._storage.read(self._record))
        except FileNotFoundError:
            return None
        except BadJsonError as error:
            raise BadArchiveError(f"{self._record} {error}") from None
        archive = record.get("archive")
        if record.get("format") != _FORMAT:
            raise BadArchiveError(f"{self._record} is of another version of elasticflow")
        if not isinstance(archive, str) or "/" in archive or not isinstance(record.get("sha256"), str):
            raise BadArchiveError(f"{self._record} names no archive")
        if not isinstance(record.get("files"), int):
            raise BadArchiveError(f"{self._record} does not say how many files there are")
        return record


def main() -> None:
    """Carry out the request on standard input, and write the result to standard output."""
    asked = from_json(Transfer, json.loads(sys.stdin.readline()))
    die_with_parent(asked.parent)
    began = time.monotonic()
    try:
        done = load(asked) if asked.action == "load" else save(asked)
    except (OSError, ElasticflowError) as error:
        done = Transferred("failed", reason=str(error) or type(error).__name__)
    done = replace(done, seconds=round(time.monotonic() - began, 3))
    sys.stdout.write(to_json(done) + "\n")
    sys.stdout.flush()


def load(asked: Transfer) -> Transferred:
    """Fill the node's folder from beside the snapshots, and seal it.

    Raises:
        OSError: the store does not answer, or the folder cannot be written.
        ElasticflowError: what lies there is not what was written, or the store cannot be opened.
    """
    folder = NodeFolder(Path(asked.folder))
    stored = _store(asked, _LOAD_PATIENCE).load()
    if stored is None:
        return Transferred("none")
    files = unpack(stored.data, folder.path)
    folder.seal(files, is_stored=True)
    return Transferred("loaded", len(files), len(stored.data))


def save(asked: Transfer) -> Transferred:
    """Seal the node's folder, and put its files beside the snapshots.

    Raises:
        OSError: the store does not answer, or the folder cannot be read.
        ElasticflowError: the cache is too large, or the store cannot be opened.
    """
    os.nice(_IDLE)
    folder = NodeFolder(Path(asked.folder))
    if folder.is_being_written():
        return Transferred("busy")
    states = folder.files()
    files = {name: state.size for name, state in states.items()}
    if (size := sum(files.values())) > MOST_BYTES:
        if folder.is_being_written() or not folder.has_still(states):
            return Transferred("busy")
        folder.seal(files, is_stored=True)  # as good as: it is not tried again
        raise BadArchiveError(
            f"it has {size >> 20} MB, and at most {MOST_BYTES >> 20} MB are put beside the snapshots"
        )
    try:
        data = pack(folder.path, files)
    except FileNotFoundError:  # the workers of a generation have ended, and the folder is being repaired
        return Transferred("busy")
    if folder.is_being_written() or not folder.has_still(states):
        return Transferred("busy")
    folder.seal(files, is_stored=False)
    store = _store(asked, _SAVE_PATIENCE)
    if asked.is_first or not store.has_one():
        store.save(data, files)
        folder.seal(files, is_stored=True)
        return Transferred("saved", len(files), len(data))
    folder.seal(files, is_stored=True)
    return Transferred("none")


def _store(asked: Transfer, patience: Patience) -> CacheStore:
    storage = Storage(asked.uri, asked.options, patience=patience)
    return CacheStore(storage, asked.prefix, MachineKind(asked.kind, asked.facts))


if __name__ == "__main__":
    main()
