"""Writes a rank's shard from shared memory to files on the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.snapshots.format import shard_file
from elasticflow.snapshots.format.manifest import STATE_FILE
from elasticflow.snapshots.store.publish import Publisher
from elasticflow.snapshots.store.reuse import ReusableFiles

if TYPE_CHECKING:
    from elasticflow.snapshots.format.shard_file import Packed, StagedShard, WrittenFile
    from elasticflow.snapshots.format.writer_config import WriterStart
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.pending import PendingSnapshot


# Ranks of which each has a shard's file, though it may be empty.
_ALWAYS = 64


class ShardWriter:
    """Writes shards of one run's snapshots; may be used from several threads."""

    def __init__(self, start: WriterStart, catalog: Catalog) -> None:
        self._run_id = start.run_id
        self._integrity = start.settings.integrity
        self._storage = catalog.storage
        self._reusable_files = ReusableFiles(catalog)
        self._publisher = Publisher(catalog)

    def write(
        self, pending: PendingSnapshot, rank: int, shard: StagedShard, memory: memoryview
    ) -> list[WrittenFile]:
        """Write *rank*'s shard, and rank 0's state.json; return the files as the manifest has them.

        Frozen tensors go to a file of their own, which is written only if no earlier snapshot has the same bytes.

        Args:
            shard: How the shard lies in *memory*.

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
        reusable = self._reusable_files.find(packed.sha256())
        if reusable is not None:
            return packed.borrowed(*reusable)
        return shard_file.write_shard(self._storage, folder, packed, "sha256")
