"""http and https: stores that are only read."""

from __future__ import annotations

from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import unquote

from elasticflow.errors import StorageError
from elasticflow.storage import errors
from elasticflow.storage.objects import ObjectStore

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
