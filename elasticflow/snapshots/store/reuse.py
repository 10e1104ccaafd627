"""Files of earlier snapshots that a new one may refer to instead of holding the same bytes again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from elasticflow.snapshots.format.manifest import OtherVersionError

if TYPE_CHECKING:
    from elasticflow.snapshots.format.manifest import FileEntry
    from elasticflow.snapshots.store.catalog import Catalog


class ReusableFiles:
    """Finds files by content; may be used from several threads.

    Content alone decides, not which tensors are frozen. A location names the snapshot that wrote the file, so
    references never form a chain.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[str, tuple[str, FileEntry]] = {}

    def find(self, sha256: str) -> tuple[str, FileEntry] | None:
        """Return location and entry of a file with these bytes that a new snapshot may refer to; None: there is none.

        The newest committed snapshot is loaded from this file. None also if the store does not answer.
        """
        with contextlib.suppress(OSError, OtherVersionError):
            if (known := self._reusable(sha256)) is not None:
                return known
            self._look()
            return self._reusable(sha256)
        return None

    def _reusable(self, sha256: str) -> tuple[str, FileEntry] | None:
        known = self._known.get(sha256)
        return known if known is not None and self._catalog.can_reuse(*known) else None

    def _look(self) -> None:
        newest = self._catalog.newest()
        files = {} if newest is None else newest.locations()
        self._known = {
            entry.sha256: (location, entry) for location, entry in files.items() if entry.sha256 is not None
        }
