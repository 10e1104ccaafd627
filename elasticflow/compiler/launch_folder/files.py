"""Files on disk: a new folder at once, or single files replaced one by one."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from elasticflow.errors import LaunchFolderError
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Create *folder* with these files: after a crash the folder is complete or absent.

    Raises:
        OSError: the folder cannot be written, or another process has made it meanwhile and put files into it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = atomic_files.temporary_beside(folder)
    try:
        for name, text in files.items():
            _write(draft / name, text)
        for inner in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            atomic_files.sync_folder(inner)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    atomic_files.sync_folder(folder.parent)


def write_into(
    folder: Path, files: Mapping[str, str], *, vouched: Mapping[str, str | None], force: bool
) -> None:
    """Replace these files of *folder* one by one, in order; if a file must not be replaced, nothing is written.

    Other files stay, except unedited files of ours that no longer belong to the folder.

    Args:
        folder: An existing folder.
        files: Text by name.
        vouched: SHA-256 of each file as we last wrote it; None: replace the file whatever its content.
        force: Replace all files whatever their content.

    Raises:
        LaunchFolderError: a file was edited, or is not ours.
        OSError: a file cannot be written.
    """
    if not force:
        _refuse_others_work(folder, files, vouched)
    for name, text in files.items():
        _write(folder / name, text)
    for name in vouched.keys() - files.keys():
        path = folder / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == vouched[name]:
            path.unlink()


def _refuse_others_work(folder: Path, files: Mapping[str, str], vouched: Mapping[str, str | None]) -> None:
    foreign: list[str] = []
    edited: list[str] = []
    for name, text in files.items():
        path = folder / name
        if not path.exists() or vouched.get(name, "") is None:
            continue
        content = path.read_bytes()
        if content == text.encode() or hashlib.sha256(content).hexdigest() == vouched.get(name):
            continue
        (edited if name in vouched else foreign).append(name)
    if edited:
        raise LaunchFolderError(
            f"{folder}: edited by hand since it was written: {', '.join(edited)}",
            "--force replaces it; or write to another folder",
        )
    if foreign:
        raise LaunchFolderError(
            f"{folder}: made by something else: {', '.join(foreign)}",
            "--force replaces it; or write to another folder",
        )


def _write(path: Path, text: str) -> None:
    atomic_files.write(path, [text.encode()], 0o777 if text.startswith("#!") else 0o666)
