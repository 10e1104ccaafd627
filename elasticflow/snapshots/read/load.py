"""The writer's side of loading: a snapshot is verified once per node, and handed to its ranks.

Where the files are on a disk of this machine's own, they are handed over as they are: verified a piece at a time in little
memory, held open meanwhile, and read again by each rank straight into its own memory, out of the system's cache. From
anywhere else they are read once, into a file in memory that all ranks of the node read.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.manifest import (
    FILE_NAME,
    STATE_FILE,
    DamagedSnapshotError,
    FileEntry,
    Manifest,
    UnreadableSnapshotError,
)
from elasticflow.snapshots.memory.shared_memory import available, memory_file
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.read.loaded import Loaded
from elasticflow.snapshots.read.stream import Stream
from elasticflow.snapshots.read.verified_files import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.snapshots.read.stream import Sink
    from elasticflow.snapshots.store.catalog import Catalog


@dataclass(frozen=True)
class Answer:
    """A verified snapshot, as ranks are told of it.

    Attributes:
        facts: What `Loaded.of` needs besides the descriptors, as JSON can say it.
        held: Its files.
    """

    facts: dict[str, Any]
    held: Held


class Reading:
    """A snapshot on its way to a node's ranks; for one use.

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
            UnreadableSnapshotError: this process may not read it.
            SnapshotError: there is no memory for it, or `stop` was called.
            OSError: the store cannot be read.
        """
        manifest = self._manifest()
        folder = self._catalog.folder()
        held = Held.opened(self._catalog.storage, folder, manifest.locations())
        try:
            if held is None:
                held = self._copied(manifest)
            else:
                self._verify(manifest)
                held.check_at(self._catalog.storage, folder)
            content = held.read(manifest.location(STATE_FILE))
            state_json.parse(content, manifest.tensors)  # here, once for all ranks of the node
        except BaseException:
            if held is not None:
                held.close()
            raise
        told = {"manifest": manifest.to_bytes().decode(), "content": content.decode(), "held": held.facts()}
        return Answer(told, held)

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
        except PermissionError as error:
            raise UnreadableSnapshotError(f"{FILE_NAME}: cannot be read: {error}") from None
        if STATE_FILE not in manifest.files:
            raise DamagedSnapshotError(f"{STATE_FILE} is not in the manifest")
        return manifest

    def _copied(self, manifest: Manifest) -> Held:
        """Return the files in memory."""
        files = verify.paths(self._catalog, manifest)
        offsets, size = _layout(files)
        if size > (left := available()):  # else the kernel would end some process to make room
            raise SnapshotError(
                f"loading snapshot {self._name} takes {size} bytes of memory, {left} are left on this node"
            )
        descriptor = memory_file("loading")

        def keep(path: str, offset: int, data: memoryview) -> None:
            # Written, not mapped: whole pages come into being full instead of zeroed first.
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offsets[path] + offset + done)
            except OSError as error:
                raise SnapshotError(f"no memory to load snapshot {self._name}: {error}") from error

        try:
            os.ftruncate(descriptor, size)
            self._verify(manifest, keep)
        except BaseException:
            os.close(descriptor)
            raise
        own = f"{self._catalog.folder()}/"
        return Held(
            [descriptor],
            {path.removeprefix(own): (0, offsets[path], entry.size) for path, entry in files.items()},
        )

    def _verify(self, manifest: Manifest, sink: Sink | None = None) -> None:
        files = verify.paths(self._catalog, manifest)
        self._stream = Stream(self._catalog.storage, files, sink=sink, progress=self._progress)
        if self._is_stopped:
            self._stream.stop()
        if damage := self._stream.read():
            raise DamagedSnapshotError("; ".join(verify.lines(self._catalog, manifest, damage)))


def load(catalog: Catalog, name: str) -> Loaded:
    """Return snapshot *name*, read and verified by this process itself.

    Raises:
        DamagedSnapshotError: as `Reading.read`, as are the others.
        SnapshotError: the same.
        OSError: the same.
    """
    answer = Reading(catalog, name).read()
    try:
        return Loaded.of(answer.facts, [os.dup(descriptor) for descriptor in answer.held.descriptors])
    finally:
        answer.held.close()


def _layout(files: Mapping[str, FileEntry]) -> tuple[dict[str, int], int]:
    """Return where each file lies in memory, and the bytes of all."""
    offsets, end = {}, 0
    for path, entry in files.items():
        offsets[path] = end
        end += -(-entry.size // mmap.PAGESIZE) * mmap.PAGESIZE
    return offsets, max(end, 1)
