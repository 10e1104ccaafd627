"""Files of a verified snapshot, held open, and the check that they are unchanged."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Self

from elasticflow.errors import SnapshotError
from elasticflow.system.kernel_files import file_system_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
