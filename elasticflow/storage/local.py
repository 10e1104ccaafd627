"""A local folder; no library is needed for it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO


class LocalStore:
    """Files on this machine's disks; after a power cut, too, each is whole or absent. See `Store`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, path: str, parts: Iterable[atomic_files.Part]) -> int:
        """See Store."""
        return atomic_files.write(self._folder / path, parts)

    def create(self, path: str, data: bytes) -> None:
        """See Store."""
        if not atomic_files.create(self._folder / path, data):
            raise FileExistsError(path)

    def read(self, path: str) -> bytes:
        """See Store."""
        return (self._folder / path).read_bytes()

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store."""
        with (self._folder / path).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, start)

    def open_read(self, path: str) -> BinaryIO:
        """See Store."""
        return (self._folder / path).open("rb")

    def size(self, path: str) -> int:
        """See Store."""
        return (self._folder / path).stat().st_size

    def modified(self, path: str) -> float:
        """See Store. On a network file system the clock is the server's."""
        return (self._folder / path).stat().st_mtime

    def exists(self, path: str) -> bool:
        """See Store."""
        try:
            # Not `Path.exists`: from Python 3.14 on it takes every error for absence.
            (self._folder / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, folder: str) -> list[str]:
        """See Store."""
        return [path.name for path in (self._folder / folder).iterdir()]

    def remove(self, path: str) -> None:
        """See Store."""
        (self._folder / path).unlink()

    def remove_tree(self, folder: str) -> None:
        """See Store."""
        shutil.rmtree(self._folder / folder)
