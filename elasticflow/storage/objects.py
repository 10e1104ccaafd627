"""Object stores (s3, gs, az, abfs), memory, and the other file systems of fsspec; http and https, which are only read."""

from __future__ import annotations

import contextlib
import errno
import itertools
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast
from urllib.parse import unquote

from elasticflow.errors import StorageError
from elasticflow.storage import errors
from elasticflow.storage.store import BLOCK, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.system.atomic_files import Part

# Bytes of one part of an upload. S3 takes 10,000 parts, so a file may have 320 GB.
_PART = 4 * BLOCK
_NOT_IN_RANGE = 416
# Answers to an exclusive put: there is an object; another put, or a removal, was under way at that moment.
_IS_TAKEN, _IN_CONFLICT = 412, 409


class ObjectStore:
    """Objects below *root* of an fsspec file system; see `Store`.

    An upload becomes visible in one act: up to a block by a single put, larger ones by the commit of their parts. One
    that breaks off before that leaves nothing at the key.
    """

    def __init__(self, fs: Any, root: str, *, has_folders: bool = False, has_parts: bool = True) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._has_folders = has_folders
        self._has_parts = has_parts

    def write(self, path: str, parts: Iterable[Part]) -> int:
        """See Store."""
        key, front, rest = self._at(path, to_write=True), bytearray(), pieces(parts)
        for piece in rest:
            if self._has_parts and len(front) + len(piece) > BLOCK:
                return self._write_in_parts(key, itertools.chain((front, piece), rest))
            front += piece
        self._fs.pipe_file(key, bytes(front))
        return len(front)

    def create(self, path: str, data: bytes) -> None:
        """See Store. Exclusive on s3, gs, az and memory (Source: fsspec 2026.9, `pipe_file(mode="create")`)."""
        key = self._at(path, to_write=True)
        if self._has_folders:
            with self._fs.open(key, "xb") as file:
                file.write(data)
        else:
            try:
                self._fs.pipe_file(key, data, mode="create")
            except FileExistsError:
                raise
            except Exception as error:
                status = errors.status_of(error)
                if status == _IS_TAKEN:
                    # s3fs looks for an element of the answer that AWS sends, and MinIO does not.
                    raise FileExistsError(path) from None
                if status == _IN_CONFLICT:
                    raise BlockingIOError(errno.EAGAIN, str(error)) from None
                raise

    def read(self, path: str) -> bytes:
        """See Store."""
        return bytes(self._fs.cat_file(self._at(path)))

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store."""
        try:
            return bytes(self._fs.cat_file(self._at(path), start=start, end=start + size))
        except Exception as error:
            # The range begins at the end of the file, or after it.
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
        """See Store. s3 has `LastModified`, gs `updated`, az `last_modified`; memory and others `created`, or nothing."""
        info = self._info(path)
        keys = ("LastModified", "last_modified", "mtime", "updated")
        written = next((info[key] for key in keys if key in info), None)
        written = datetime.fromisoformat(written) if isinstance(written, str) else written
        return written.timestamp() if isinstance(written, datetime) else None

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
        key = self._at(folder)
        paths = [path.rstrip("/") for path in self._fs.ls(key, detail=False)]
        # Some back-ends list the folder itself, too.
        return [path.rpartition("/")[2] for path in paths if path.strip("/") != key.strip("/")]

    def remove(self, path: str) -> None:
        """See Store."""
        self._fs.rm_file(self._at(path))

    def remove_tree(self, folder: str) -> None:
        """See Store."""
        self._fs.rm(self._at(folder), recursive=True)

    def _info(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = self._fs.info(self._at(path))
        return info

    def _at(self, path: str, *, to_write: bool = False) -> str:
        key = f"{self._root}/{path}" if path else self._root
        if to_write and self._has_folders:
            self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)
        return key

    def _write_in_parts(self, key: str, parts: Iterator[Part]) -> int:
        file = self._fs.open(key, "wb", block_size=_PART, autocommit=False)
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


_ABSENT = (404, 410)


class HttpStore(ObjectStore):
    """Files below a URL, through fsspec's http; see `Store`.

    The names in a folder come from the server's index page: without such a page, no snapshot is seen.
    """

    def __init__(self, fs: Any, root: str, shown: str) -> None:
        super().__init__(fs, root)
        self._shown = shown

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store. A server without range requests sends the whole file."""
        data = super().read_range(path, start, size)
        return data if len(data) <= size else data[start : start + size]

    def open_read(self, path: str) -> BinaryIO | None:
        """See Store."""
        url = self._at(path)
        # The server answers range requests.
        if len(self._fs.cat_file(url, start=0, end=1)) <= 1:
            return None
        return cast("BinaryIO", self._fs.open(url, "rb", block_size=0))

    def list(self, folder: str) -> list[str]:
        """See Store."""
        url = self._at(folder) + "/"
        links = [link for link in self._fs.ls(url, detail=False) if link.startswith(url)]
        names = {unquote(link.removeprefix(url).rstrip("/")) for link in links}
        # An index page also links to itself in another order (`?C=N`), and to the folder above.
        return [name for name in names if name and not name.startswith(("?", "..")) and "/" not in name]

    def _info(self, path: str) -> dict[str, Any]:
        try:
            return super()._info(path)
        except FileNotFoundError as error:
            # fsspec raises this for every failure (Source: implementations/http.py, `_info`, fsspec 2026.9).
            status = errors.status_of(error)
            if error.__cause__ is not None and status not in _ABSENT:
                raise error.__cause__ from None
            raise

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        remedy = "write to another place and serve that: http only reads"
        raise StorageError(f"{self._shown} is read-only", remedy)

    write = create = remove = remove_tree = _refuse
