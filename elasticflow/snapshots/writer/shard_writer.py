"""Writes a rank's shard from shared memory to files on the store, or refers to a file of an earlier snapshot."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from elasticflow.snapshots.format import shard_file
from elasticflow.snapshots.format.manifest import STATE_FILE, OtherVersionError
from elasticflow.snapshots.store.publish import Publisher

if TYPE_CHECKING:
    from elasticflow.snapshots.client.writer_process import WriterStart
    from elasticflow.snapshots.format.manifest import FileEntry
    from elasticflow.snapshots.format.shard_file import Packed, StagedShard, WrittenFile
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.pending import PendingSnapshot


# Ranks of which each has a shard's file, though it may be empty.
_ALWAYS = 64


class ShardWriter:
    """Writes shards of one run's snapshots; may be used from several threads."""

    def __init__(self, start: WriterStart, catalog: Catalog) -> None:
        self._run_id = start.run_id
        self._integrity = start.settings.integrity
        self._catalog, self._storage = catalog, catalog.storage
        # Location and entry of the newest snapshot's files, by content.
        self._known: dict[str, tuple[str, FileEntry]] = {}
        self._publisher = Publisher(catalog)

    def write(
        self, pending: PendingSnapshot, rank: int, shard: StagedShard, memory: memoryview
    ) -> list[WrittenFile]:
        """Write *rank*'s shard, and rank 0's state.json; return the files as the manifest has them.

        Frozen tensors go to a file of their own, which is written only if no earlier snapshot has the same bytes.

        Raises:
            OSError: the store failed; nothing half written is at a file's name.
        """
        folder = self._publisher.place(pending.name)
        staged = memory[: shard.nbytes]
        ranks = rank, pending.world_size
        about = {"run_id": self._run_id, "snapshot": pending.name, "step": str(pending.step)}
        own = [tensor for tensor in shard.tensors if not tensor.frozen]
        files = []
        # A rank of few always has a file; of many some store nothing, and no reader needs their files.
        if own or pending.world_size <= _ALWAYS:
            packed = shard_file.pack(shard_file.shard_name(*ranks), tensors=own, staged=staged, about=about)
            files.append(shard_file.write_shard(self._storage, folder, packed, self._integrity))
        if frozen := [tensor for tensor in shard.tensors if tensor.frozen]:
            # The header names no snapshot, so that equal tensors make equal files.
            about = {"run_id": self._run_id}
            packed = shard_file.pack(
                shard_file.frozen_name(*ranks), tensors=frozen, staged=staged, about=about
            )
            files.append(self._write_or_borrow(folder, packed))
        if shard.record is not None:
            state = shard.record.state
            files.append(shard_file.write_json(self._storage, folder, STATE_FILE, state, self._integrity))
        return files

    def _write_or_borrow(self, folder: str, packed: Packed) -> WrittenFile:
        reusable = self.reusable(packed.sha256())
        if reusable is not None:
            return packed.borrowed(*reusable)
        return shard_file.write_shard(self._storage, folder, packed, "sha256")

    def reusable(self, sha256: str) -> tuple[str, FileEntry] | None:
        """Return location and entry of a file with these bytes that a new snapshot may refer to; None: there is none.

        The newest committed snapshot is loaded from this file. None also if the store does not answer. A location names the
        snapshot that wrote the file, so references never form a chain.
        """
        with contextlib.suppress(OSError, OtherVersionError):
            if (known := self._reusable(sha256)) is not None:
                return known
            newest = self._catalog.newest()
            files = {} if newest is None else newest.locations()
            self._known = {e.sha256: (location, e) for location, e in files.items() if e.sha256 is not None}
            return self._reusable(sha256)
        return None

    def _reusable(self, sha256: str) -> tuple[str, FileEntry] | None:
        known = self._known.get(sha256)
        return known if known is not None and self._catalog.can_reuse(*known) else None
