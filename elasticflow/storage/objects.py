"""Object stores, and whatever else fsspec reaches: s3, gs, az, abfs, memory."""

from __future__ import annotations

import contextlib
import itertools
from datetime import datetime
from typing import TYPE_CHECKING, Any

from elasticflow.storage import errors
from elasticflow.storage.store import BLOCK, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    from elasticflow.system.atomic_files import Part

# Bytes of one part of an upload; S3 takes 10,000 parts: 320 GB.
_PART = 4 * BLOCK
_NOT_IN_RANGE = 416


class ObjectStore:
    """Objects below *root* of an fsspec file system; see `Store`.

    An upload becomes visible in one act: a single put up to a block, else parts and their commit. What breaks off before
    that leaves nothing at the key.
    """

    def __init__(self, fs: Any, root: str, *, has_folders: bool = False, has_parts: bool = True) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._has_folders = has_folders
        self._has_parts = has_parts

    def write(self, path: str, parts: Iterable[Part]) -> int:
        """See Store."""
        place, front, rest = self._at(path, to_write=True), bytearray(), pieces(parts)
        for piece in rest:
            if self._has_parts and len(front) + len(piece) > BLOCK:
                return self._write_in_parts(place, itertools.chain((front, piece), rest))
            front += piece
        self._fs.pipe_file(place, bytes(front))
        return len(front)

    def create(self, path: str, data: bytes) -> None:
        """See Store. Exclusive on s3, gs, az and memory (Source: fsspec 2026.9, `pipe_file(mode="create")`)."""
        place = self._at(path, to_write=True)
        if self._has_folders:
            with self._fs.open(place, "xb") as file:
                file.write(data)
        else:
            self._fs.pipe_file(place, data, mode="create")

    def replace(self, path: str, data: bytes) -> None:
        """See Store."""
        self._fs.pipe_file(self._at(path, to_write=True), data)

    def read(self, path: str) -> bytes:
        """See Store."""
        return bytes(self._fs.cat_file(self._at(path)))

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store."""
        try:
            return bytes(self._fs.cat_file(self._at(path), start=start, end=start + size))
        except Exception as error:
            # From the end of the file on there is nothing to read.
            if errors.status_of(error) == _NOT_IN_RANGE:
                return b""
            raise

    def open_read(self, path: str) -> BinaryIO | None:
        """See Store."""
        return None

    def size(self, path: str) -> int:
        """See Store."""
        return int(self._info(path)["size"])

    def modified(self, path: str) -> float | None:
        """See Store. s3 says LastModified, gs updated, az last_modified; memory and others created, or nothing."""
        info = self._info(path)
        found = next(
            (info[key] for key in ("LastModified", "last_modified", "mtime", "updated") if key in info), None
        )
        found = datetime.fromisoformat(found) if isinstance(found, str) else found
        return found.timestamp() if isinstance(found, datetime) else None

    def exists(self, path: str) -> bool:
        """See Store."""
        try:
            # fsspec's own `exists` takes every error for absence.
            self._info(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, folder: str) -> list[str]:
        """See Store."""
        place = self._at(folder)
        found = [path.rstrip("/") for path in self._fs.ls(place, detail=False)]
        # Some back-ends list the folder itself too.
        return [path.rpartition("/")[2] for path in found if path.strip("/") != place.strip("/")]

    def remove(self, path: str) -> None:
        """See Store."""
        self._fs.rm_file(self._at(path))

    def remove_tree(self, folder: str) -> None:
        """See Store."""
        self._fs.rm(self._at(folder), recursive=True)

    def _info(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._fs.info(self._at(path))
        return found

    def _at(self, path: str, *, to_write: bool = False) -> str:
        place = f"{self._root}/{path}" if path else self._root
        if to_write and self._has_folders:
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        return place

    def _write_in_parts(self, place: str, parts: Iterator[Part]) -> int:
        file = self._fs.open(place, "wb", block_size=_PART, autocommit=False)
        size = 0
        try:
            for part in parts:
                size += len(part)
                file.write(part)
            file.close()
            file.commit()
        except BaseException:
            # Leaving a `with` would close the file, and close uploads what is there: discard, never close.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(Exception):
                file.closed = True
            raise
        return size
