"""Files of earlier snapshots that a new one may refer to instead of holding the same bytes again (floor 1)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.snapshots.manifest import FileEntry


class Lending:
    """Finds files by content; safe to use from several threads.

    Content alone decides, never which tensors are said to be frozen. What is found is a file of the snapshot that
    wrote it, so references never form a chain.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[tuple[str | None, int], str] = {}

    def find(self, entry: FileEntry) -> str | None:
        """Return where, in the folder of all snapshots, a file with these bytes can be referred to; None: nowhere.

        It is one that the newest committed snapshot is loaded from. A store that cannot be asked has none.
        """
        with contextlib.suppress(OSError):
            if (known := self._lendable(entry)) is not None:
                return known
            self._look()
            return self._lendable(entry)
        return None

    def _lendable(self, entry: FileEntry) -> str | None:
        location = self._known.get((entry.sha256, entry.size))
        return location if location is not None and self._catalog.lends(location, entry) else None

    def _look(self) -> None:
        newest = self._catalog.newest()
        self._known = {} if newest is None else {
            (entry.sha256, entry.size): location
            for location, entry in newest.locations().items()
            if entry.sha256 is not None
        }  # fmt: skip
