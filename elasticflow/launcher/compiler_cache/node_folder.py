"""The compiler's cache of one node: the folder that torch writes, and which of its files are whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.system import atomic_files
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# torch's compiler splits its own command lines at blanks (measured, 2.13).
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:-]+")
_LOCKS = "locks"
# Files that compilers write in place. Torch writes all others beside their name, and renames them.
_WRITTEN_IN_PLACE = frozenset({".so", ".o", ".gch"})


class FileState(NamedTuple):
    """A file's bytes, and when it was last written (nanoseconds)."""

    size: int
    modified: int


@dataclass(frozen=True)
class NodeFolder:
    """The folder that torch's compiler uses on one node; the node's workers share it.

    A worker that is killed may leave a library half written, which torch would take for whole for ever. So the folder is
    *sealed* once a generation trains: the seal, a file beside it, names the files that are whole.
    """

    path: Path

    @property
    def seal_path(self) -> Path:
        """The seal."""
        return self.path.with_name(f"{self.path.name}.json")

    def why_unusable(self) -> str | None:
        """Return why torch could not compile in this folder; None if it could. The folder is made."""
        text = str(self.path)
        if not _PLAIN.fullmatch(text):
            odd = _PLAIN.sub("", text)[0]
            return f"torch's compiler cannot work in a folder with {odd!r} in its path: {text}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            flags = os.statvfs(self.path).f_flag
        except OSError as error:
            return f"{text} cannot be made: {error}"
        if flags & os.ST_NOEXEC:
            return f"the file system of {text} is mounted noexec"
        return None

    def files(self) -> dict[str, FileState]:
        """Return the files of the cache, by path from the folder, without locks and files being written."""
        found = {}
        for folder, folders, names in os.walk(self.path):
            place = self.path.__class__(folder)
            folders[:] = sorted(name for name in folders if name != _LOCKS and not name.startswith("."))
            for name in sorted(names):
                file = place / name
                try:
                    state = file.stat()
                except FileNotFoundError:  # renamed since
                    continue
                if not name.startswith(".") and not name.endswith(".tmp"):
                    found[file.relative_to(self.path).as_posix()] = FileState(
                        state.st_size, state.st_mtime_ns
                    )
        return found

    def has_still(self, files: Mapping[str, FileState]) -> bool:
        """Return whether *files*, as `files` returned them, are as they were."""
        now = self.files()
        return all(now.get(name) == state for name, state in files.items())

    def is_being_written(self) -> bool:
        """Return whether a compiler writes a file now."""
        for lock in (self.path / _LOCKS).glob("*.lock"):
            try:
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except FileNotFoundError:  # the folder is being repaired
                continue
        return False

    def seal(self, files: dict[str, int], *, is_stored: bool) -> None:
        """Write down that *files*, sizes by path, are whole.

        Args:
            is_stored: The files are beside the snapshots, too.
        """
        content = {"files": files, "stored": is_stored}
        atomic_files.write(self.seal_path, (json.dumps(content).encode(),))

    def sealed(self) -> dict[str, int] | None:
        """Return the files that are whole, sizes by path; None if the folder is not sealed."""
        files = self._read_seal().get("files")
        return files if isinstance(files, dict) else None

    def is_stored(self) -> bool:
        """Return whether the sealed files are beside the snapshots, too."""
        return self._read_seal().get("stored") is True

    def has_news(self) -> bool:
        """Return whether there is something to seal, or to put beside the snapshots."""
        sizes = {name: state.size for name, state in self.files().items()}
        return bool(sizes) and (sizes != self.sealed() or not self.is_stored())

    def repair(self) -> None:
        """Remove files that may be half written: no process may use the folder. Without a whole file nothing stays sealed."""
        sealed = self.sealed() or {}
        for name, state in self.files().items():
            known = sealed.get(name)
            if known != state.size and (
                known is not None or os.path.splitext(name)[1] in _WRITTEN_IN_PLACE  # noqa: PTH122
            ):
                (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / _LOCKS, ignore_errors=True)
        if not self.files():
            self.seal_path.unlink(missing_ok=True)

    def _read_seal(self) -> dict[str, object]:
        try:
            return parse(self.seal_path.read_bytes())
        except (OSError, BadJsonError):  # absent or damaged: what it said is found out anew
            return {}
