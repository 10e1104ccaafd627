"""http and https: files to read, never to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast
from urllib.parse import unquote

from elasticflow.errors import StorageError
from elasticflow.storage import errors
from elasticflow.storage.objects import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.system.atomic_files import Part

_ABSENT = (404, 410)


class HttpStore(ObjectStore):
    """Files below a URL, by fsspec's http; see `Store`.

    Names in a folder come from the server's index page; without one, no snapshot is found there.
    """

    def __init__(self, fs: Any, root: str, shown: str) -> None:
        super().__init__(fs, root)
        self._shown = shown

    def write(self, path: str, parts: Iterable[Part]) -> NoReturn:
        """Refuse."""
        self._refuse()

    def create(self, path: str, data: bytes) -> NoReturn:
        """Refuse."""
        self._refuse()

    def replace(self, path: str, data: bytes) -> NoReturn:
        """Refuse."""
        self._refuse()

    def remove(self, path: str) -> NoReturn:
        """Refuse."""
        self._refuse()

    def remove_tree(self, folder: str) -> NoReturn:
        """Refuse."""
        self._refuse()

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store. A server that knows no ranges sends the whole file."""
        data = super().read_range(path, start, size)
        return data if len(data) <= size else data[start : start + size]

    def open_read(self, path: str) -> BinaryIO | None:
        """See Store."""
        place = self._at(path)
        if len(self._fs.cat_file(place, start=0, end=1)) <= 1:
            return None
        # The server may not know ranges, so the file is one stream.
        return cast("BinaryIO", self._fs.open(place, "rb", block_size=0))

    def list(self, folder: str) -> list[str]:
        """See Store."""
        place = self._at(folder) + "/"
        links = [link for link in self._fs.ls(place, detail=False) if link.startswith(place)]
        names = {unquote(link.removeprefix(place).rstrip("/")) for link in links}
        # An index also links to its own other orders (`?C=N`) and to the folder above.
        return [name for name in names if name and not name.startswith(("?", "..")) and "/" not in name]

    def _info(self, path: str) -> dict[str, Any]:
        try:
            return super()._info(path)
        except FileNotFoundError as error:
            # fsspec says so of every failure (Source: implementations/http.py, `_info`, fsspec 2026.9).
            status = errors.status_of(error)
            if error.__cause__ is not None and status not in _ABSENT:
                raise error.__cause__ from None
            raise

    def _refuse(self) -> NoReturn:
        remedy = "write to another place and serve that: http only reads"
        raise StorageError(f"{self._shown} is read-only", remedy)
