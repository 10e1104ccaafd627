"""Local files that are whole or absent, also after a power cut: flush, fsync, rename, fsync the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
Part = bytes | bytearray | memoryview


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, parts: Iterable[Part], mode: int = 0o666) -> int:
    """Put *parts* at *path*, replacing what was there, and return their bytes; its folder is made.

    The file's permissions are *mode* less the umask. A crash leaves the old file or the new one, and at worst a hidden
    temporary file beside it. The temporary file lies in the same folder, since a rename between file systems is a copy.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = replace(path, parts, mode)
    sync_folder(path.parent)
    return size


def replace(path: Path, parts: Iterable[Part], mode: int = 0o666, *, sync: bool = True) -> int:
    """Do as `write` in a folder that exists, without waiting until the disk has the file's name.

    Unless *sync* is true the disk may not have its content either: a power cut may leave an empty file.
    """
    temporary = temporary_beside(path)
    try:
        size = _fill(temporary, parts, mode, sync=sync)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def create(path: Path, data: bytes) -> bool:
    """Put *data* at *path* if nothing is there; True if this call made it.

    A link to a finished file is made, not the file itself opened with O_EXCL: a reader would see that half
    written, and a crash would leave it so for ever.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        _fill(temporary, (data,))
        try:
            _link(temporary, path)
        except FileExistsError:
            # A network file system that has lost its answer asks again, and finds the link that it has made.
            if temporary.stat().st_nlink == 1:
                return False
        sync_folder(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _link(finished: Path, path: Path) -> None:
    try:
        os.link(finished, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links: still exclusive, but not whole at once.
        _fill(path, (finished.read_bytes(),))


def temporary_name(name: str) -> str:
    """Return a hidden name for what becomes the file or folder *name*, beside it."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


def temporary_beside(path: Path) -> Path:
    """Return a hidden name in the folder of *path*, which nothing else has."""
    return path.with_name(temporary_name(path.name))


def remove_temporaries(path: Path) -> None:
    """Remove the temporary files that killed writers of *path* have left; no one may be writing *path*."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def _fill(path: Path, parts: Iterable[Part], mode: int = 0o666, *, sync: bool = True) -> int:
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while rest:  # an unbuffered write may be short
                done = file.write(rest)
                size += done
                rest = rest[done:]
        if sync:
            os.fsync(file.fileno())
    return size
