"""What the storage door asks of a back-end, and reading a file by ranges."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed import WriteableBuffer

    from elasticflow.system.atomic_files import Part

# Most bytes of one request.
BLOCK = 8 << 20
_AHEAD = 1 << 20


class Store(Protocol):
    """Files under one address. Paths are relative to it, with `/`.

    An absent file is FileNotFoundError, also for `remove`; any other failure is whatever the library below raises, which
    the storage door tries again or turns into an OSError.
    """

    def write(self, path: str, parts: Iterable[Part]) -> int:
        """Put *parts* at *path* and return their bytes; nothing half written is ever at that name."""

    def create(self, path: str, data: bytes) -> None:
        """Put *data* at *path*, or raise FileExistsError if something is there."""

    def replace(self, path: str, data: bytes) -> None:
        """Put the small file *data* at *path* in one act."""

    def read(self, path: str) -> bytes:
        """Return the whole file."""

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """Return *size* bytes from *start*, fewer where the file ends before."""

    def open_read(self, path: str) -> BinaryIO | None:
        """Return the file open for reading, or None if reading it by ranges is as good."""

    def size(self, path: str) -> int:
        """Return the file's bytes, as they are now."""

    def modified(self, path: str) -> float | None:
        """Return the Unix time at which the file was written, by the store's own clock; None if that is not told."""

    def exists(self, path: str) -> bool:
        """Return whether a file is there now; no answer is an error, not absence."""

    def list(self, folder: str) -> list[str]:
        """Return the names in *folder*, in any order."""

    def remove(self, path: str) -> None:
        """Remove the file."""

    def remove_tree(self, folder: str) -> None:
        """Remove the folder and all in it."""


class RangeReader(io.RawIOBase):
    """A remote file as a stream of ranges, each of which is asked for, and tried again, on its own."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size = size
        self._place = 0

    @classmethod
    def buffered(cls, read_range: Callable[[int, int], bytes], size: int) -> BinaryIO:
        """Return the stream; small reads are served from memory, large ones go straight to the caller's."""
        return cast("BinaryIO", io.BufferedReader(cls(read_range, size), min(_AHEAD, max(size, 1))))

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Begin the next read there."""
        self._place = max(0, offset + {0: 0, 1: self._place, 2: self._size}[whence])
        return self._place

    def readinto(self, target: WriteableBuffer) -> int:
        """Fill *target* as far as one request goes; 0 at the end of the file."""
        view = memoryview(target).cast("B")
        wanted = max(0, min(len(view), self._size - self._place, BLOCK))
        data = self._read_range(self._place, wanted) if wanted else b""
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return the rest; io's own asks for 8 KiB at a time."""
        found = []
        while self._place < self._size:
            data = self._read_range(self._place, min(BLOCK, self._size - self._place))
            if not data:
                # The file is shorter than it was when it was opened.
                break
            found.append(data)
            self._place += len(data)
        return b"".join(found)


def pieces(parts: Iterable[Part]) -> Iterator[memoryview]:
    """Yield the bytes of *parts* in pieces of at most a block; empty ones are left out."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            yield rest[:BLOCK]
            rest = rest[BLOCK:]
