"""Keys of a store on disk, so that a server which was killed and started again knows what the one before it knew."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from typing import TYPE_CHECKING

from elasticflow.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "keys.sqlite3"
_FORMAT = "1"
# Sums whose answer a client may not have got; each asks again at once when the server is back.
_SUMS = 10_000
_TABLES = """
create table if not exists about (name text primary key, value text) without rowid;
create table if not exists keys (path text primary key, value blob) without rowid;
create table if not exists sums (request blob unique, total integer);
"""


class KeptKeys:
    """The keys in *folder*, which is made; no other process may use it meanwhile.

    A change is there for the next server once the method returns, however this process ends; after a power cut the last
    changes may be missing, and none is there by half.

    Attributes:
        state: Tells these keys from those of any other folder, and of any server that keeps none.

    Raises:
        StorageError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self._path, timeout=0.0, isolation_level=None, check_same_thread=False
            )
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._database.close)
                # The lock is held from here on.
                self._database.execute("pragma locking_mode = exclusive")
                self._database.execute("pragma journal_mode = wal")
                self._database.execute("pragma synchronous = normal")
                self._database.executescript(_TABLES)
                self.state = self._about("state", secrets.token_hex(16))
                made_by = self._about("format", _FORMAT)
                on_error.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error
        if made_by != _FORMAT:
            raise self._unusable(f"it is of format {made_by}, and this version writes {_FORMAT}")

    def load(self) -> dict[str, bytes]:
        """Return all keys and their values.

        Raises:
            StorageError: the keys cannot be read.
        """
        try:
            return dict(self._database.execute("select path, value from keys"))
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def put(self, path: str, value: bytes) -> None:
        """Give *path* a value.

        Raises:
            StorageError: it cannot be written, as in all methods that change something.
        """
        self._do("insert or replace into keys values (?, ?)", path, value)

    def delete(self, path: str) -> None:
        """Remove *path*."""
        self._do("delete from keys where path = ?", path)

    def put_sum(self, path: str, total: int, request: bytes) -> None:
        """Give *path* the value *total*, and remember that this answers *request*."""
        self._do("begin")
        self.put(path, str(total).encode())
        self._do("insert into sums values (?, ?)", request, total)
        self._do("delete from sums where rowid <= last_insert_rowid() - ?", _SUMS)
        self._do("commit")

    def sum_of(self, request: bytes) -> int | None:
        """Return the answer to *request*; None if the request was not carried out."""
        row = self._do("select total from sums where request = ?", request).fetchone()
        return None if row is None else int(row[0])

    def close(self) -> None:
        """Let another server have the folder."""
        self._database.close()

    def _about(self, name: str, value: str) -> str:
        """Return the folder's fact *name*; if there is none, record *value* as that fact."""
        self._database.execute("insert or ignore into about values (?, ?)", (name, value))
        row = self._database.execute("select value from about where name = ?", (name,)).fetchone()
        return str(row[0])

    def _do(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: object) -> StorageError:
        if "locked" in str(error):
            return StorageError(
                f"the store's state in {self._path} is used by another server",
                "end that server, or give this one another folder with --state",
            )
        return StorageError(
            f"the store's state in {self._path} cannot be used: {error}",
            "see to room and permissions there; a folder that is damaged has to be removed, and runs that used it "
            "continue by their own commands, from their snapshots",
        )
