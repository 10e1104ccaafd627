"""The interface of a back-end of `Storage`, and reading a file by ranges."""

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

    For an absent file every method, `remove` too, raises FileNotFoundError. Other failures are those of the library
    below: `Storage` tries again, or turns them into an OSError.
    """

    def write(self, path: str, parts: Iterable[Part]) -> int:
        """Put *parts* at *path*, in place of what was there, and return their bytes; nothing half written is ever at that name."""

    def create(self, path: str, data: bytes) -> None:
        """Put *data* at *path*; raise FileExistsError if something is there."""

    def read(self, path: str) -> bytes:
        """Return the whole file."""

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """Return *size* bytes from *start* on, fewer where the file ends before that."""

    def open_read(self, path: str) -> BinaryIO | None:
        """Return the file open for reading, or None if reading it by ranges is as good."""

    def size(self, path: str) -> int:
        """Return the file's bytes, as they are now."""

    def modified(self, path: str) -> float | None:
        """Return the Unix time at which the file was written, by the store's clock; None if the store does not say."""

    def exists(self, path: str) -> bool:
        """Return whether a file is there now; a store that does not answer is an error."""

    def list(self, folder: str) -> list[str]:
        """Return the names in *folder*, in any order."""

    def remove(self, path: str) -> None:
        """Remove the file."""

    def remove_tree(self, folder: str) -> None:
        """Remove the folder and all in it."""


class RangeReader(io.RawIOBase):
    """A remote file as a stream of ranges; each range is one request, and is tried again by itself."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size = size
        self._place = 0

    @classmethod
    def buffered(cls, read_range: Callable[[int, int], bytes], size: int) -> BinaryIO:
        """Return the stream with a buffer for small reads; large reads go straight into the caller's memory."""
        return cast("BinaryIO", io.BufferedReader(cls(read_range, size), min(_AHEAD, max(size, 1))))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Begin the next read at *offset*; return where that is."""
        self._place = max(0, offset + {0: 0, 1: self._place, 2: self._size}[whence])
        return self._place

    def readinto(self, target: WriteableBuffer) -> int:
        """Fill *target* as far as one request goes; return the bytes read, 0 at the end of the file."""
        view = memoryview(target).cast("B")
        wanted = max(0, min(len(view), self._size - self._place, BLOCK))
        data = self._read_range(self._place, wanted) if wanted else b""
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return the rest; the method of io makes a request for every 8 KiB."""
        blocks = []
        while self._place < self._size:
            data = self._read_range(self._place, min(BLOCK, self._size - self._place))
            if not data:
                # The file is shorter than it was when it was opened.
                break
            blocks.append(data)
            self._place += len(data)
        return b"".join(blocks)


def pieces(parts: Iterable[Part]) -> Iterator[memoryview]:
    """Yield the bytes of *parts* in pieces of at most a block; empty ones are left out."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            yield rest[:BLOCK]
            rest = rest[BLOCK:]
