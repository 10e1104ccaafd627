"""Loads a snapshot: a node's writer verifies it once, and each rank reads its tensors.

Files on a disk of this machine go to the ranks as they are: the writer verifies them piece by piece and holds them open
meanwhile; then each rank reads them again, from the system's cache, straight into its own memory. Files from elsewhere
are read once, into a file in memory that all ranks of the node read. Of tensors in pieces a node reads the rows that its ranks hold.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.manifest import (
    FILE_NAME,
    STATE_FILE,
    DamagedSnapshotError,
    FileEntry,
    Manifest,
    UnreadableSnapshotError,
    parse,
)
from elasticflow.snapshots.read.needed import blocks_of, nbytes_of, needed_blocks
from elasticflow.snapshots.read.verify import SnapshotStream, needed_files
from elasticflow.system.free_memory import available
from elasticflow.system.kernel_files import file_system_of
from elasticflow.system.shared_memory import memory_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from elasticflow.snapshots.format.pieces import Part, Span
    from elasticflow.snapshots.read.needed import Partly
    from elasticflow.snapshots.read.stream import Sink
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.storage.storage import Storage

# Most files that are handed over open: one message carries their descriptors, and a process may have few more.
MOST = 200
# File systems that only this machine writes. NFS and its like show what other machines write late or not at all, and
# every rank that reads from them uses the network again.
_OWN_KINDS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay"}
)

Extent = tuple[int, int, int]
"""Number of the descriptor, offset of a file's first byte, its bytes."""
StatMark = list[int]


class VerifiedFiles:
    """Bytes of files behind open descriptors; `close`, or the end of the object, closes them.

    Args:
        descriptors: One for each file, or one of a file in memory that has the bytes of all files.
        extents: Where the bytes of each file are, by location (`Manifest.location`).
        stat_marks: Size and times of each descriptor's file when it was verified; None: as it is now.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        extents: Mapping[str, Extent],
        stat_marks: Sequence[StatMark] | None = None,
    ) -> None:
        self.descriptors = tuple(descriptors)
        self._close = weakref.finalize(self, _close_all, self.descriptors)
        self._extents = dict(extents)
        self._stat_marks = (
            [_stat_mark(os.fstat(fd)) for fd in descriptors] if stat_marks is None else list(stat_marks)
        )

    @classmethod
    def opened(cls, storage: Storage, folder: str, locations: Iterable[str]) -> Self | None:
        """Return the files at *locations* in *folder*, open.

        None if they are to be copied once for the whole node instead: they are not on a disk of this machine, they are
        too many, or one of them cannot be opened.
        """
        names = list(locations)
        if not storage.is_local or len(names) > MOST:
            return None
        if file_system_of(storage.local_path(folder)) not in _OWN_KINDS:
            return None
        descriptors: list[int] = []
        try:
            for name in names:
                path = storage.local_path(f"{folder}/{name}")
                # One by one: on an error, the files before it are closed.
                descriptors.append(os.open(path, os.O_RDONLY))
        except OSError:
            _close_all(descriptors)
            return None
        sizes = [os.fstat(fd).st_size for fd in descriptors]
        return cls(descriptors, {name: (n, 0, sizes[n]) for n, name in enumerate(names)})

    @classmethod
    def from_json(cls, content: Mapping[str, Any], descriptors: Sequence[int]) -> Self:
        """Return the files that `to_json` gave; the descriptors belong to them from now on."""
        extents = {location: tuple(extent) for location, extent in content["extents"].items()}
        return cls(descriptors, extents, content["stat_marks"])

    def to_json(self) -> dict[str, Any]:
        """Return the record that `from_json` needs in another process besides the descriptors."""
        return {"extents": self._extents, "stat_marks": self._stat_marks}

    def read(self, location: str) -> bytes:
        """Return a whole file; raises as `read_into`."""
        content = bytearray(self._extents[location][2])
        self.read_into(location, 0, memoryview(content))
        return bytes(content)

    def read_into(self, location: str, offset: int, target: memoryview) -> None:
        """Fill *target* with a file's bytes from *offset* on, as they were verified.

        Raises:
            SnapshotError: the file changed meanwhile, or cannot be read. *target* may hold anything then.
        """
        number, start, _ = self._extents[location]
        descriptor, done = self.descriptors[number], 0
        try:
            while done < len(target):
                size = os.preadv(descriptor, [target[done:]], start + offset + done)
                if not size:
                    raise _changed(location)
                done += size
            if _stat_mark(os.fstat(descriptor)) != self._stat_marks[number]:
                raise _changed(location)
        except OSError as error:
            raise SnapshotError(f"{location}: cannot be read: {type(error).__name__}: {error}") from error

    def check_at(self, storage: Storage, folder: str) -> None:
        """Raise unless the files that were opened are still there, unchanged, under their names.

        Raises:
            SnapshotError: a file is gone or changed; the text names it.
        """
        for location, (number, _, _) in self._extents.items():
            try:
                mark = _stat_mark(storage.local_path(f"{folder}/{location}").stat())
            except OSError:
                mark = []
            if mark != self._stat_marks[number]:
                raise _changed(location)

    def close(self) -> None:
        """Close the descriptors; bytes already read stay."""
        self._close()


def _stat_mark(stat: os.stat_result) -> StatMark:
    """Return values that differ once a file was written, cut, replaced or removed."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _changed(location: str) -> SnapshotError:
    return SnapshotError(f"{location} changed while it was loaded; the next start verifies it again")


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass(frozen=True)
class LoadedSnapshot:
    """A verified snapshot, whose tensors are read one by one into the reader's own memory.

    Attributes:
        files: The snapshot's files, open.
        partly: Blocks that were verified of files that were not verified whole; see `needed_blocks`.
        whole: Returns the snapshot with every byte verified, for other bytes than *partly* has.
    """

    manifest: Manifest
    state_json: str
    files: VerifiedFiles
    partly: Partly = field(default_factory=dict)
    whole: Callable[[], LoadedSnapshot] | None = None

    @cached_property
    def state(self) -> dict[str, Any]:
        """Content of state.json."""
        content: dict[str, Any] = json.loads(self.state_json)
        return content

    def to_json(self) -> dict[str, Any]:
        """Return the record that `from_json` needs in another process besides the files' descriptors."""
        return {
            "manifest": self.manifest.to_bytes().decode(),
            "state_json": self.state_json,
            "files": self.files.to_json(),
            "partly": {location: sorted(blocks) for location, blocks in self.partly.items()},
        }

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], descriptors: Sequence[int], whole: Callable[[], LoadedSnapshot]
    ) -> LoadedSnapshot:
        """Return the snapshot that `to_json` gave; the descriptors belong to it from now on."""
        manifest = parse(content["manifest"].encode())
        files = VerifiedFiles.from_json(content["files"], descriptors)
        partly = {location: frozenset(blocks) for location, blocks in content["partly"].items()}
        return cls(manifest, content["state_json"], files, partly, whole)

    def read_into(self, key: str, target: memoryview, begin: int = 0) -> None:
        """Fill *target* with bytes of tensor *key* from *begin* on, as they were verified; reads no other bytes.

        Bytes that this node did not need are verified now: those of a tensor that was sharded and is not any more.

        Raises:
            SnapshotError: a file of the tensor changed meanwhile, or cannot be read.
        """

        def read(span: Span, part: memoryview) -> None:
            location = self.manifest.location(span.file)
            verified, files = self.partly.get(location), self.files
            if verified is not None and not verified.issuperset(blocks_of(span)):
                assert self.whole is not None
                files = self.whole().files
            files.read_into(location, span.offset, part)

        self.manifest.whole[key].fill(target, begin, read)


class SnapshotReader:
    """Reads and verifies one snapshot, once.

    Args:
        progress: Called with the bytes read so far, from one thread at a time.
        parts: Rows of sharded tensors that are needed. None: everything is needed.

    Attributes:
        parts: As given, or as `narrow` was called.
    """

    def __init__(
        self,
        catalog: Catalog,
        name: str,
        progress: Callable[[int], None] | None = None,
        parts: frozenset[Part] | None = None,
    ) -> None:
        self._catalog, self._name, self._progress = catalog, name, progress
        self.parts = parts
        self._lock = threading.Lock()
        self._stream: SnapshotStream | None = None
        self._is_stopped = False

    def narrow(self, parts: frozenset[Part]) -> None:
        """Read no other rows from now on, where all was to be read; from any thread."""
        with self._lock:
            self.parts = parts
            if self._stream is not None:
                self._stream.narrow(needed_blocks(self._stream.manifest, parts))

    def read(self) -> LoadedSnapshot:
        """Return the snapshot, every byte of it verified that is needed.

        Raises:
            DamagedSnapshotError: the snapshot is not what was written; the text says which file, and where in it.
            UnreadableSnapshotError: this process may not read the snapshot.
            SnapshotError: there is no memory for the snapshot, or `stop` was called.
            OSError: the store cannot be read.
        """
        manifest = self._manifest()
        folder = self._catalog.folder()
        files = VerifiedFiles.opened(self._catalog.storage, folder, manifest.locations())
        try:
            if files is None:
                files, partly = self._copied(manifest)
            else:
                partly = self._verify(manifest)
                files.check_at(self._catalog.storage, folder)
            content = files.read(manifest.location(STATE_FILE))
            # Checked here, once for all ranks of the node.
            state_json.parse(content, manifest.whole)
        except BaseException:
            if files is not None:
                files.close()
            raise
        return LoadedSnapshot(manifest, content.decode(), files, partly)

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

    def _copied(self, manifest: Manifest) -> tuple[VerifiedFiles, Partly]:
        """Return the files, verified, as copies in memory, and the blocks that are there."""
        files = needed_files(self._catalog, manifest)
        # Blocks that are not written take no memory.
        offsets, size = _layout(files)
        needed = nbytes_of(manifest, needed_blocks(manifest, self.parts))
        # Without this check, the kernel would kill a process to make room.
        if needed > (left := available()):
            raise SnapshotError(
                f"loading snapshot {self._name} takes {needed} bytes of memory, {left} are left on this node"
            )
        descriptor = memory_file("loading")

        def keep(path: str, offset: int, data: memoryview) -> None:
            # Written, not mapped: so the kernel need not fill new pages with zeros first.
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offsets[path] + offset + done)
            except OSError as error:
                raise SnapshotError(f"no memory to load snapshot {self._name}: {error}") from error

        try:
            os.ftruncate(descriptor, size)
            partly = self._verify(manifest, keep)
        except BaseException:
            os.close(descriptor)
            raise
        own = f"{self._catalog.folder()}/"
        extents = {path.removeprefix(own): (0, offsets[path], entry.size) for path, entry in files.items()}
        return VerifiedFiles([descriptor], extents), partly

    def _verify(self, manifest: Manifest, sink: Sink | None = None) -> Partly:
        """Verify the bytes that are needed; return the blocks of files that were not verified whole."""
        with self._lock:
            self._stream = stream = SnapshotStream(
                self._catalog,
                manifest,
                sink=sink,
                partly=needed_blocks(manifest, self.parts),
                progress=self._progress,
            )
        if self._is_stopped:
            stream.stop()
        if damage := stream.read():
            raise DamagedSnapshotError("; ".join(damage))
        with self._lock:
            return needed_blocks(manifest, self.parts)


def load(catalog: Catalog, name: str) -> LoadedSnapshot:
    """Return snapshot *name*, read and verified by this process itself; raises as `SnapshotReader.read`."""
    return SnapshotReader(catalog, name).read()


def _layout(files: Mapping[str, FileEntry]) -> tuple[dict[str, int], int]:
    """Return the offset of each file in memory, and the bytes of all files."""
    offsets, end = {}, 0
    for path, entry in files.items():
        offsets[path] = end
        end += -(-entry.size // mmap.PAGESIZE) * mmap.PAGESIZE
    return offsets, max(end, 1)
