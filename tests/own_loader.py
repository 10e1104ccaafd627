"""Snapshots loaded without a writer, for tests of what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.snapshots.client.loading import NodeLoader
from elasticflow.snapshots.read import load

if TYPE_CHECKING:
    from elasticflow.snapshots.read.load import LoadedSnapshot
    from elasticflow.snapshots.store.catalog import Catalog


class OwnLoader(NodeLoader):
    """Loads in this process, as the node's writer does for its ranks."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def load(self, name: str) -> LoadedSnapshot:
        """Return snapshot *name*, read and verified here."""
        return load.load(self.catalog, name)

    def release(self) -> None:
        """Keep the files open until the snapshot is gone."""
