"""The writer's side of loading: a snapshot is read and verified once per node, into memory that ranks map (floor 1)."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots import reader
from elasticflow.snapshots.manifest import FILE_NAME, STATE_FILE, DamagedSnapshotError, FileEntry, Manifest
from elasticflow.snapshots.mapped import Loaded
from elasticflow.snapshots.memory import available, memory_file
from elasticflow.snapshots.streaming import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.snapshots.catalog import Catalog


@dataclass(frozen=True)
class Answer:
    """A snapshot in a memory file, as ranks are told of it.

    Attributes:
        manifest: What it holds.
        content: Content of state.json, as text.
        descriptor: Of the memory file.
        size: Its bytes.
        files: Offset and size of each file, by location (`Manifest.location`).
    """

    manifest: Manifest
    content: str
    descriptor: int
    size: int
    files: dict[str, tuple[int, int]]

    def facts(self) -> dict[str, Any]:
        """Return what `Loaded.of` needs besides the descriptor, as JSON can say it."""
        return {
            "manifest": self.manifest.to_bytes().decode(),
            "content": self.content,
            "size": self.size,
            "files": self.files,
        }

    def close(self) -> None:
        """Give up the descriptor; who has mapped the memory keeps it."""
        os.close(self.descriptor)


class Reading:
    """A snapshot on its way from the store into memory; for one use.

    Args:
        catalog: Where it is.
        name: Which.
        progress: Called with the bytes read so far, from one thread at a time.
    """

    def __init__(self, catalog: Catalog, name: str, progress: Callable[[int], None] | None = None) -> None:
        self._catalog, self._name, self._progress = catalog, name, progress
        self._stream: Stream | None = None
        self._is_stopped = False

    def read(self) -> Answer:
        """Return the snapshot, every byte of it verified.

        Raises:
            DamagedSnapshotError: it is not what was written; says which file, and where in it.
            SnapshotError: there is no memory for it, or `stop` was called.
            OSError: the store cannot be read.
        """
        manifest = self._manifest()
        files = reader.paths(self._catalog, manifest)
        offsets, size = _layout(files)
        if size > (left := available()):  # else the kernel would end some process to make room
            raise SnapshotError(
                f"loading snapshot {self._name} takes {size} bytes of memory, {left} are left on this node"
            )
        descriptor = memory_file("loading")
        try:
            os.ftruncate(descriptor, size)
            self._fill(descriptor, manifest, files, offsets)
            state = f"{self._catalog.folder(manifest.name)}/{STATE_FILE}"
            content = os.pread(descriptor, files[state].size, offsets[state]).decode()
        except BaseException:
            os.close(descriptor)
            raise
        own = f"{self._catalog.folder()}/"
        places = {path.removeprefix(own): (offsets[path], entry.size) for path, entry in files.items()}
        return Answer(manifest, content, descriptor, size, places)

    def stop(self) -> None:
        """Have `read` end soon; from any thread."""
        self._is_stopped = True
        if self._stream is not None:
            self._stream.stop()

    def _manifest(self) -> Manifest:
        try:
            manifest = self._catalog.manifest(self._name)
        except FileNotFoundError:
            raise SnapshotError(
                f"snapshot {self._name} has no {FILE_NAME} as this node sees it; is snapshots.uri one place for all?"
            ) from None
        if STATE_FILE not in manifest.files:
            raise DamagedSnapshotError(f"{STATE_FILE} is not in the manifest")
        return manifest

    def _fill(
        self,
        descriptor: int,
        manifest: Manifest,
        files: Mapping[str, FileEntry],
        offsets: Mapping[str, int],
    ) -> None:
        def keep(path: str, offset: int, data: memoryview) -> None:
            # Written, not mapped: whole pages come into being full instead of zeroed first.
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offsets[path] + offset + done)
            except OSError as error:
                raise SnapshotError(f"no memory to load snapshot {self._name}: {error}") from error

        self._stream = Stream(self._catalog.storage, files, sink=keep, progress=self._progress)
        if self._is_stopped:
            self._stream.stop()
        if damage := self._stream.read():
            raise DamagedSnapshotError("; ".join(reader.lines(self._catalog, manifest, damage)))


def load(catalog: Catalog, name: str) -> Loaded:
    """Return snapshot *name*, read and verified by this process itself.

    Raises:
        DamagedSnapshotError: as `Reading.read`, as are the others.
        SnapshotError: the same.
        OSError: the same.
    """
    answer = Reading(catalog, name).read()
    try:
        return Loaded.of(answer.facts(), answer.descriptor)
    finally:
        answer.close()


def _layout(files: Mapping[str, FileEntry]) -> tuple[dict[str, int], int]:
    """Return where each file lies in memory, and the bytes of all."""
    offsets, end = {}, 0
    for path, entry in files.items():
        offsets[path] = end
        end += -(-entry.size // mmap.PAGESIZE) * mmap.PAGESIZE
    return offsets, max(end, 1)
