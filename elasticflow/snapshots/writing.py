"""A rank's share, from staging memory to files on the store (floor 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.snapshots import shards
from elasticflow.snapshots.manifest import STATE_FILE
from elasticflow.snapshots.publish import Publisher
from elasticflow.snapshots.staging import TensorEntry

if TYPE_CHECKING:
    from elasticflow.snapshots.board import ShareSet
    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.snapshots.commit import Config
    from elasticflow.snapshots.shards import WrittenFile


class ShareWriting:
    """Writes shares of one run's snapshots; safe to use from several threads."""

    def __init__(self, config: Config, catalog: Catalog) -> None:
        self._run_id = config.run_id
        self._storage = catalog.storage
        self._publisher = Publisher(catalog)

    def write(
        self, share_set: ShareSet, rank: int, message: dict[str, Any], memory: memoryview
    ) -> list[WrittenFile]:
        """Write *rank*'s share, and rank 0's state.json; return what the manifest says about the files.

        Args:
            share_set: The snapshot.
            rank: Whose share.
            message: What the worker sent with it (`StagingClient.stage`).
            memory: The staging buffer.

        Raises:
            OSError: the store failed; nothing half written is at a file's name.
        """
        place = self._publisher.place(share_set.name)
        tensors = [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in message["tensors"]]
        staged = memory[: message["nbytes"]]
        about = {"run_id": self._run_id, "snapshot": share_set.name, "step": str(share_set.step)}
        name = shards.shard_name(rank, share_set.world_size)
        files = [shards.write_shard(self._storage, place, name, tensors=tensors, staged=staged, about=about)]
        if message["record"] is not None:
            files.append(shards.write_json(self._storage, place, STATE_FILE, message["record"]["state"]))
        return files
