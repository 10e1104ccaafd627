"""Makes files a snapshot in one act: a rename on local disks, one exclusive put elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow import run_folder
from elasticflow.errors import StorageError
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.shard_file import WrittenFile
from elasticflow.storage.retry import Patience
from elasticflow.system import atomic_files, fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog

# Prefix of the folder of a snapshot that is being written on a local disk.
UNFINISHED = ".tmp-"
# Prefix of such a folder while it is being removed.
SWEPT = ".swept-"
_POLL_LEAST_S, _POLL_MOST_S = 0.02, 1.0
# Limit for all nodes that wait for a commit, together.
_MOST_LOOKS_PER_S = 256
# While a store is in trouble, the next snapshot matters more than tidying up after the last one.
_TIDYING = Patience(total_s=2.0)


class CommitRefusedError(Exception):
    """The snapshot cannot be committed; the text says why."""


class CommitAbandonedError(CommitRefusedError):
    """The node that commits has given the snapshot up for good."""


class Publisher:
    """Publishes snapshots of one run, each of which is whole or not there.

    On a local disk, files go to a hidden folder that is renamed once it has all of them. Elsewhere a rename is a copy
    and a removal: files go to their final keys, and the manifest, put last and only if there is none, commits them.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._storage = catalog.storage

    def place(self, name: str) -> str:
        """Return the folder that files of snapshot *name* are written to before the commit."""
        hidden = UNFINISHED if self._storage.is_local else ""
        return f"{self._catalog.folder()}/{hidden}{name}"

    def publish(self, record: Manifest) -> None:
        """Commit the snapshot whose files are all in `place`.

        Raises:
            CommitRefusedError: a file is not there as written, or the name is taken, or a borrowed file is gone.
            OSError: the store failed; the snapshot is not committed.
        """
        place = self.place(record.name)
        self._check_files(place, record)
        fault_injection.reach("commit.before_manifest")
        if not self._put_manifest(f"{place}/{manifest.FILE_NAME}", record.to_bytes()):
            raise CommitRefusedError("there is a manifest already: a snapshot is never overwritten")
        try:
            # If this process was halted in between, another one may have swept the files.
            self._check_files(place, record)
        except (CommitRefusedError, FileNotFoundError):
            self._storage.remove(f"{place}/{manifest.FILE_NAME}")
            raise
        if self._storage.is_local:
            final = self._storage.local_path(self._catalog.folder(record.name))
            fault_injection.reach("commit.before_rename")
            # The rename fails if the name is taken.
            self._storage.local_path(place).rename(final)
            atomic_files.sync_folder(final.parent)
        fault_injection.reach("commit.committed")

    def discard(self, name: str, files: Collection[str] | None = None) -> None:
        """Remove *files* (None: all) written for snapshot *name*, unless it is committed.

        `sweep` removes later what cannot be removed now.
        """
        storage = self._storage.with_patience(_TIDYING)
        with contextlib.suppress(OSError, StorageError):
            if not storage.is_local and storage.exists(f"{self._catalog.folder(name)}/{manifest.FILE_NAME}"):
                return
            if files is None:
                storage.remove_tree(self.place(name))
            for file in files or ():
                storage.remove(f"{self.place(name)}/{file}")

    def sweep(self, generation: int, busy: Collection[str]) -> None:
        """Remove the folders that writers of generations before *generation* left, uncommitted or half removed.

        The names in *busy* are left alone.

        Raises:
            OSError: as `Catalog.do_all` raises it.
        """
        self._catalog.do_all(partial(self.clear, folder) for folder in self._left(generation, busy))

    def _left(self, generation: int, busy: Collection[str]) -> Iterator[str]:
        for folder in self._storage.list(self._catalog.folder()):
            name = bare_name(folder)
            match = run_folder.SNAPSHOT_NAME.fullmatch(name)
            if match is None or int(match["generation"]) >= generation or name in busy:
                continue
            if folder != name or not self._catalog.is_committed(name):
                yield folder

    def clear(self, folder: str) -> None:
        """Remove *folder*, which a dead writer left among the snapshots; a writer that is only late can then not commit it."""
        place = self._catalog.folder()
        if self._storage.is_local and folder.startswith(UNFINISHED):
            swept = folder.replace(UNFINISHED, SWEPT)
            # The folder is absent if the snapshot was committed in this moment.
            with contextlib.suppress(FileNotFoundError):
                self._storage.local_path(f"{place}/{folder}").rename(
                    self._storage.local_path(f"{place}/{swept}")
                )
            folder = swept
        self._storage.remove_tree(f"{place}/{folder}")

    def _check_files(self, place: str, record: Manifest) -> None:
        sizes = self._storage.map(lambda name: self._storage.size(f"{place}/{name}"), record.files)
        for (name, entry), size in zip(record.files.items(), sizes, strict=True):
            if size != entry.size:
                raise CommitRefusedError(f"{name} has {size} bytes on the store, {entry.size} were written")
        for location, entry in record.borrowed.items():
            if not self._catalog.can_reuse(location, entry):
                raise CommitRefusedError(
                    f"{location}, which it refers to, is no longer there or was set aside"
                )

    def announce(self, name: str, rank: int, content: dict[str, Any]) -> None:
        """Tell the node of rank 0 that this rank's shard is written, or why it is not."""
        self._storage.write(_record(self.place(name), rank), [to_json(content).encode()])

    def await_shards(
        self, name: str, ranks: Collection[int], limit_s: float, alive: Callable[[], bool]
    ) -> list[WrittenFile]:
        """Return the shards of *ranks*, which other nodes write.

        Each look lists the folder and reads only new files, so that the store is not asked for each rank again.

        Raises:
            CommitRefusedError: a node failed, *limit_s* passed, or *alive* became false.
        """
        written: dict[int, list[WrittenFile]] = {}
        deadline, pause = time.monotonic() + limit_s, _POLL_LEAST_S
        while missing := [rank for rank in ranks if rank not in written]:
            for rank, content in self._announced(name, missing):
                if "failed" in content:
                    raise CommitRefusedError(f"rank {rank}: {content['failed']}")
                written[rank] = [from_json(WrittenFile, file) for file in content["files"]]
            if len(written) == len(ranks):
                break
            if not alive():
                raise CommitRefusedError("the generation ended before all shares were staged")
            if time.monotonic() > deadline:
                raise CommitRefusedError(f"the shares of ranks {missing} did not come within {limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MOST_S)
        return [file for files in written.values() for file in files]

    def _announced(self, name: str, ranks: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Return the announcements received so far, by rank."""
        names = set(self._storage.list(self.place(name)))
        there = [rank for rank in ranks if _record_name(rank) in names]
        contents = self._storage.map(lambda rank: self._read(_record(self.place(name), rank)), there)
        return [
            (rank, content)
            for rank, content in zip(there, contents, strict=True)
            if content is not None  # half written
        ]

    def await_commit(
        self, name: str, rank: int, limit_s: float, alive: Callable[[], bool], nodes: int = 1
    ) -> None:
        """Wait until the node of rank 0 has committed snapshot *name*, of which *rank* of this node wrote a shard.

        The more *nodes* wait, the less often each looks: the store gets no more requests from all of them.

        Raises:
            CommitAbandonedError: that node gave the snapshot up.
            CommitRefusedError: *limit_s* passed, or *alive* became false; that node may still commit.
        """
        deadline, pause = time.monotonic() + limit_s, _POLL_LEAST_S
        longest_s = max(_POLL_MOST_S, nodes / _MOST_LOOKS_PER_S)
        record = _record(self.place(name), rank)
        while not self._catalog.is_committed(name):
            verdict = self._read(_record(self.place(name), 0))
            # Records go away with the commit, or when the node of rank 0 discards the files.
            if verdict is not None or not self._storage.exists(record):
                if self._catalog.is_committed(name):
                    return
                raise CommitAbandonedError(
                    f"the node of rank 0: {(verdict or {}).get('failed', 'gave the snapshot up')}"
                )
            if not alive():
                raise CommitRefusedError("the generation ended before the snapshot was committed")
            if time.monotonic() > deadline:
                raise CommitRefusedError(f"the node of rank 0 did not commit within {limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, longest_s)

    def withdraw(self, name: str, files: Collection[str], ranks: Collection[int]) -> None:
        """Remove *files*, the shards of *ranks*, and their announcements from a snapshot that was given up."""
        self.discard(name, [*files, *(_record("", rank).removeprefix("/") for rank in ranks)])

    def remove_records(self, name: str, ranks: Sequence[int]) -> None:
        """Remove the other nodes' records from the committed snapshot *name*."""
        with contextlib.suppress(OSError, StorageError):
            folder = self._catalog.folder(name)
            self._storage.map(lambda rank: self._storage.remove(_record(folder, rank)), ranks)

    def _put_manifest(self, path: str, data: bytes) -> bool:
        """Create the manifest; True also if an earlier put succeeded and only its answer was lost."""
        try:
            if self._storage.create(path, data):
                return True
        except OSError:
            if self._storage.exists(path) and self._storage.read(path) == data:
                return True
            raise
        return self._storage.read(path) == data

    def _read(self, path: str) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(self._storage.read(path))
        except (FileNotFoundError, ValueError):
            # The record is absent, or half written on a store without atomic puts.
            return None
        return content


def bare_name(folder: str) -> str:
    """Return the name of the snapshot that was, or was to be, in *folder*."""
    return folder.removeprefix(UNFINISHED).removeprefix(SWEPT)


def _record(folder: str, rank: int) -> str:
    return f"{folder}/{_record_name(rank)}"


def _record_name(rank: int) -> str:
    return f"shard-{rank:05d}.json"
