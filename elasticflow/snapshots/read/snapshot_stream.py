"""Reads files of one snapshot once: every byte is checked, and the manifest is checked against the files' own headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.snapshots.format.manifest import FILE_NAME
from elasticflow.snapshots.read.headers import Headers
from elasticflow.snapshots.read.stream import VerifiedStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from elasticflow.snapshots.format.manifest import FileEntry, Manifest
    from elasticflow.snapshots.read.needed import Partly
    from elasticflow.snapshots.read.stream import Sink
    from elasticflow.snapshots.store.catalog import Catalog

_BORROWED = "; it is borrowed, and no snapshot that borrows it can be loaded"


class SnapshotStream:
    """Reads and verifies files of a snapshot, and passes their bytes to a sink; for one use.

    Args:
        catalog: Where the snapshot is.
        paths: The files, as `needed_files` names them; None: all that are needed to load the snapshot.
        sink: As for `VerifiedStream`.
        partly: Blocks to read of files that are not read whole; see `needed_blocks`.
        progress: Called with the bytes read so far.
        to_the_end: Read on after the first damage.

    Attributes:
        manifest: As given.
    """

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        paths: Collection[str] | None = None,
        *,
        sink: Sink | None = None,
        partly: Partly | None = None,
        progress: Callable[[int], None] | None = None,
        to_the_end: bool = False,
    ) -> None:
        self._catalog, self.manifest, self._sink = catalog, manifest, sink
        needed = needed_files(catalog, manifest)
        self._files = {path: entry for path, entry in needed.items() if paths is None or path in paths}
        self._headers = Headers(manifest, catalog.folder())
        self._stream = VerifiedStream(
            catalog.storage, self._files, sink=self._take, progress=progress, to_the_end=to_the_end
        )
        self.narrow(partly or {})
        self._to_the_end = to_the_end

    def narrow(self, partly: Partly) -> None:
        """Read no more of the files that *partly* names than it says; from any thread."""
        self._stream.partly = {f"{self._catalog.folder()}/{name}": blocks for name, blocks in partly.items()}

    def read(self) -> list[str]:
        """Return a line for each damaged file, the manifest among them if it contradicts a file's header; empty: all is whole.

        Raises:
            UnreadableSnapshotError: this process may not read a file on a disk of this machine.
            SnapshotError: the store could not be read, the sink failed, or `stop` was called.
        """
        damage = self._stream.read()
        lines = _described(self._catalog, self.manifest, damage)
        # The header of a file that is damaged itself, or was not read to its end, is not known.
        known = self._files.keys() - damage.keys() if self._to_the_end or not damage else set()
        known -= {path for path, blocks in self._stream.partly.items() if not blocks}
        if (text := self._headers.contradiction(known)) is not None:
            lines.append(f"{FILE_NAME}: {text}")
        return lines

    def stop(self) -> None:
        """Have `read` end soon; from any thread."""
        self._stream.stop()

    def _take(self, path: str, offset: int, data: memoryview) -> None:
        self._headers.take(path, offset, data)
        if self._sink is not None:
            self._sink(path, offset, data)


def needed_files(catalog: Catalog, manifest: Manifest) -> dict[str, FileEntry]:
    """Return every file that is needed to load the snapshot, by its path in the storage."""
    return {f"{catalog.folder()}/{location}": entry for location, entry in manifest.locations().items()}


def _described(catalog: Catalog, manifest: Manifest, damage: Mapping[str, str]) -> list[str]:
    """Return a line for each damaged path; that of a borrowed file names its snapshot, and says what that means."""
    own, all_ = f"{catalog.folder(manifest.name)}/", f"{catalog.folder()}/"
    return [
        f"{path.removeprefix(own).removeprefix(all_)}: {text}{'' if path.startswith(own) else _BORROWED}"
        for path, text in damage.items()
    ]
