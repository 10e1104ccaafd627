"""Giving a finished file or folder its name in one act, with or without something of that name there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING

from elasticflow.system.atomic_files import sync_folder, temporary_beside

if TYPE_CHECKING:
    from pathlib import Path

# RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h.
_NO_REPLACE, _EXCHANGE = 1, 2
# AT_FDCWD: relative paths start at the working folder.
_HERE = -100
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def put(finished: Path, path: Path, *, replaces: bool) -> None:
    """Rename *finished*, a file or a folder, to *path*, and make that survive a power cut.

    With *replaces*, what is at *path* changes places with it in one act and is then removed: at no moment is there
    nothing, or a mixture.

    Raises:
        FileExistsError: something is there, and it is not to be replaced.
        OSError: the rename failed; the old file or folder is still there.
    """
    if replaces and os.path.lexists(path):
        _exchange(finished, path)
        remove(finished)
    else:
        _rename(finished, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it; no error if it is absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Make all files in *folder*, and their names, survive a power cut."""
    for path in (folder, *folder.rglob("*")):
        sync_folder(path)  # fsync is the same call for files and folders


def _rename(finished: Path, path: Path) -> None:
    if _renameat2(finished, path, _NO_REPLACE):
        return
    # This file system cannot check and rename in one act, so they follow one another.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    finished.rename(path)


def _exchange(finished: Path, path: Path) -> None:
    if _renameat2(finished, path, _EXCHANGE):
        return
    if finished.is_dir() or path.is_dir():
        aside = temporary_beside(path)
        path.rename(aside)
        finished.rename(path)
        aside.rename(finished)
    else:
        finished.replace(path)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Return False where the system or the file system does not know how."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_HERE, os.fsencode(old), _HERE, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(new))
