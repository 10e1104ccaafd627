"""The snapshot policy as train.py states it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.format.digests import Integrity


@dataclass(frozen=True)
class Policy:
    """When snapshots are taken, where they go, which stay.

    Attributes:
        uri: Any fsspec URL or path; None: the run folder.
        every: Intervals, any of which makes one due: "500 steps", "10 min", "1 epoch".
        keep_last: Newest ones that stay.
        keep_best: Best ones by the evaluation's metric that stay as well.
        keep_every: One at each of these stays as well.
        keep_within: Those at most this much older than the newest stay as well.
        integrity: Digest of every file: "crc32" or "sha256".
        memory: The state is also held in the node's memory at each of these.
        staging_limit: Most memory that the node takes for snapshots, like "4 GiB".
        options: For the file system.
        ignore: What training moves and no snapshot is to hold: the job says that no step depends on it.
    """

    uri: str | None
    every: tuple[str, ...]
    keep_last: int = 3
    keep_best: int | None = None
    keep_every: str | None = None
    keep_within: str | None = None
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
