"""The snapshot policy as train.py states it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.format.policy import Keep
from elasticflow.snapshots.format.writer_config import WriterConfig
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system.units import parse_size

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.format.digests import Integrity
    from elasticflow.snapshots.format.policy import BestMode


@dataclass(frozen=True)
class Policy:
    """When snapshots are taken, where they go, which stay.

    Attributes:
        uri: Any fsspec URL or path; None: the run folder.
        every: Intervals, any of which makes one due: "500 steps", "10 min", "1 epoch".
        keep: Which ones stay.
        integrity: Digest of every file: "crc32" or "sha256".
        memory: The state is also held in the node's memory at each of these.
        staging_limit: Most memory that the node takes for snapshots, like "4 GiB".
        options: For the file system.
        ignore: What training moves and no snapshot is to hold: the job says that no step depends on it.
    """

    uri: str | None
    every: tuple[str, ...]
    keep: Keep = field(default_factory=Keep)
    integrity: Integrity = "crc32"
    memory: str | None = None
    staging_limit: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    def catalog(self, folder: RunFolder, run_id: str) -> Catalog:
        """Return the run's place at the URI."""
        if self.uri is None:
            return Catalog(Storage(str(folder.path)))
        return Catalog(Storage(self.uri, self.options), f"{run_id}/")

    def writer_config(self, best_mode: BestMode | None) -> WriterConfig:
        """Return what the snapshot writer has to know of it; *best_mode* says what `keep.best` ranks by."""
        limit = None if self.staging_limit is None else parse_size(self.staging_limit)
        return WriterConfig(replace(self.keep, best_mode=best_mode), self.integrity, limit, self.options)
