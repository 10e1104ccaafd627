"""All access to files of snapshots: writes that commit or leave nothing, exclusive create, listings that are never cached.

Local folders need no library, so that a process that uses no other store never loads one; `sftp://` needs asyncssh;
everything else (s3, gs, az, abfs, http to read, memory for tests ...) goes through fsspec.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from elasticflow.errors import StorageError, StorageFullError
from elasticflow.storage import errors, retry, urls
from elasticflow.storage.retry import Patience
from elasticflow.storage.store import RangeReader
from elasticflow.system import atomic_files, fault_injection, redaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from elasticflow.storage.store import Store

T = TypeVar("T")
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_AT_A_TIME = 16
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the errors that say that there is no room."""

# Short, so that a wrong address is reported soon.
_AT_THE_CHECK = Patience(total_s=15.0)


def several_at_a_time(action: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """Return the results of *action* for *items*, in their order; several threads call it."""
    pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="storage")
    try:
        return list(pool.map(action, items))
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Trouble:
    """An operation that failed with a transient error and is tried again; without secrets.

    Attributes:
        error: Class of the error, and the first line of its message.
        attempt: Tries so far.
    """

    operation: str
    kind: str
    error: str
    attempt: int
    pause_s: float


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


class Storage:
    """Files under one URI: a local folder, or a store on another machine.

    Every method takes paths relative to the URI, with `/`, and may be called from several threads. Failures are OSErrors
    of the fitting class, without secrets. An operation that fails on another machine with a transient error (no answer, a reset, too
    many requests, 5xx) is tried again for a bounded time; a refusal, an absent file or a full disk fails at once.

    Attributes:
        uri: The URI as given, with a password in it masked.
        is_local: True for paths and `file://`.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        patience: Patience | None = None,
        on_trouble: Callable[[Trouble], object] | None = None,
    ) -> None:
        """Remember the URI; nothing is opened yet.

        Args:
            uri: A path, or a URL; a password in it is kept but never shown.
            options: For the library that serves the URL; they win over the environment.
            patience: How long a store may be in trouble before an operation fails.
            on_trouble: Called before an operation is tried again, by the thread that waits for it.
        """
        protocol = urls.protocol_of(uri)
        self._given = uri
        self._options = dict(options or {})
        self._protocol = protocol
        self._patience = patience or Patience()
        self._on_trouble = on_trouble
        self.uri = redaction.mask_url(uri)
        self.is_local = protocol in {"file", "local"}
        plain = re.sub(r"^(file|local)://", "", uri, flags=re.IGNORECASE)
        # Used for local folders only.
        self._folder = Path(plain).expanduser().absolute()
        self._store: Store | None = LocalStore(self._folder) if self.is_local else None
        self._pid = os.getpid()

    @property
    def absolute_uri(self) -> str:
        """The URI with its secrets, meaning the same in every working directory; never to be shown."""
        return str(self._folder) if self.is_local else self._given

    def local_path(self, path: str = "") -> Path:
        """Return where *path* lies on this machine; only for local folders."""
        if not self.is_local:
            raise ValueError(f"{self.uri} is not a local folder")
        return self._folder / path if path else self._folder

    def with_patience(self, patience: Patience) -> Storage:
        """Return the same storage with another patience; both share what is open."""
        same = copy.copy(self)
        same._patience = patience  # noqa: SLF001  # our own
        return same

    def write(
        self, path: str, parts: Iterable[atomic_files.Part] | Callable[[], Iterable[atomic_files.Part]]
    ) -> int:
        """Put *parts* at *path*, in place of what was there, and return their bytes; if that fails, nothing half written is there.

        A list, or a function that returns the parts anew, is tried again as a whole. An iterator is not: only the
        store's own library repeats single requests.
        """
        fault_injection.reach("storage.write")
        if callable(parts):
            return self._do("write", path, lambda store: store.write(path, parts()))
        is_once = iter(parts) is parts
        patience = Patience(total_s=0.0) if is_once else None
        return self._do("write", path, lambda store: store.write(path, parts), patience)

    def create(self, path: str, data: bytes) -> bool:
        """Put *data* at *path* if nothing is there; True if this call made the file, False if there was one.

        Exclusive on local disks, s3, gs, az, abfs, sftp and memory. On another machine a file with equal bytes counts as
        made by this call, since the answer to a put may be lost: if that matters, *data* should name its writer.
        """
        fault_injection.reach("storage.create")
        try:
            self._do("create", path, lambda store: store.create(path, data))
        except FileExistsError:
            if self.is_local:
                return False
            # An earlier put may have succeeded, and only its answer was lost.
            with contextlib.suppress(FileNotFoundError):
                return self.read(path) == data
            return False
        return True

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        fault_injection.reach("storage.read")
        return self._do("read", path, lambda store: store.read(path))

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """Return *size* bytes from *start* on, fewer where the file ends before that."""
        fault_injection.reach("storage.read")
        return self._do("read", path, lambda store: store.read_range(path, start, size)) if size > 0 else b""

    def open_read(self, path: str) -> BinaryIO:
        """Return the file open for reading; the caller closes it."""
        fault_injection.reach("storage.read")
        file = self._do("read", path, lambda store: store.open_read(path))
        if file is not None:
            return file
        return RangeReader.buffered(lambda start, size: self.read_range(path, start, size), self.size(path))

    def exists(self, path: str) -> bool:
        """Return whether a file is there now, never from a cache; a store that does not answer is an error."""
        return self._do("look for", path, lambda store: store.exists(path))

    def size(self, path: str) -> int:
        """Return the file's bytes, never from a cache."""
        return self._do("look for", path, lambda store: store.size(path))

    def modified(self, path: str) -> float | None:
        """Return the Unix time at which the file was written, by the store's clock; None if the store does not say."""
        return self._do("look for", path, lambda store: store.modified(path))

    def list(self, folder: str = "") -> list[str]:
        """Return the names in *folder*, sorted, never from a cache; empty if there is no such folder."""
        try:
            return sorted(set(self._do("list", folder, lambda store: store.list(folder))))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        """Remove the file; no error if it is absent."""
        fault_injection.reach("storage.remove")
        with contextlib.suppress(FileNotFoundError):
            self._do("remove", path, lambda store: store.remove(path))

    def map(self, action: Callable[[_In], _Out], items: Iterable[_In]) -> Sequence[_Out]:
        """Return the results of *action*, which asks this storage, for *items*, in their order.

        On another machine several are asked for at a time, since answers take long to arrive. An error of one item is raised here, and
        items that are not begun are left out.
        """
        return [action(item) for item in items] if self.is_local else several_at_a_time(action, items)

    def remove_tree(self, folder: str) -> None:
        """Remove the folder and all in it; no error if it is absent."""
        fault_injection.reach("storage.remove")
        with contextlib.suppress(FileNotFoundError):
            self._do("remove", folder, lambda store: store.remove_tree(folder))

    def check_writable(self, folder: str = "") -> None:
        """Make, read and remove a small file in *folder*, and make sure that it is not made twice.

        Raises:
            StorageError: that failed, the URI can only be read, or the package for it is missing; names the URI and
                the cause.
            StorageFullError: there is no room.
        """
        probe = f"{folder}.elasticflow-probe-{secrets.token_hex(4)}"
        quick = self.with_patience(_AT_THE_CHECK)
        is_exclusive = True
        try:
            quick.create(probe, b"probe")
            is_exclusive = not quick.create(probe, b"other")
            back = quick.read(probe)
            quick.remove(probe)
            cause = (
                None if back == b"probe" or not is_exclusive else "what was written is not what is read back"
            )
        except OSError as error:
            if error.errno in FULL:
                raise StorageFullError(
                    f'snapshots.uri "{self.uri}" is full: {error.strerror}',
                    "make room there; then the same command continues",
                ) from error
            cause = f"{type(error).__name__}: {error}"
        if cause is not None:
            where = (
                "that the folder exists and may be written"
                if self.is_local
                else "the address and its credentials"
            )
            remedy = f"check {where}, or choose another place: snapshots.uri of a job file, join(snapshots=...) of a script"
            raise StorageError(f'snapshots.uri "{self.uri}" cannot be written: {cause}', remedy)
        if not is_exclusive:
            # Some stores with S3's protocol ignore the condition of a put.
            raise StorageError(
                f'snapshots.uri "{self.uri}" replaces a file where it is asked to make a new one only: two starts of a run, '
                "each on its own machine, would write into one another's snapshots",
                "set snapshots.uri to a store that has conditional writes (If-None-Match)",
            )

    def _do(self, what: str, path: str, action: Callable[[Store], T], patience: Patience | None = None) -> T:
        if self.is_local and self._store is not None:
            return action(self._store)

        def on_retry(error: Exception, tries: int, pause_s: float) -> None:
            if self._on_trouble is not None:
                kind = type(error).__name__
                self._on_trouble(Trouble(f"{what} {path}", kind, self._text(error), tries, pause_s))

        try:
            store = self._opened()
            return retry.call(lambda: action(store), patience or self._patience, on_retry)
        except StorageError:
            raise
        except Exception as error:
            if errors.kind_of(error) is type(error) and self._mask(full := errors.in_full(error)) == full:
                raise
            without_secrets = errors.as_os_error(error, self._text(error))
        # Raised outside of the handler: its cause may hold secrets.
        raise without_secrets

    def _opened(self) -> Store:
        # Connections do not survive a fork.
        if self._store is None or self._pid != os.getpid():
            try:
                self._store = urls.open_store(self._given, self._options, self.uri)
            except (ImportError, ValueError, TypeError) as error:
                package = urls.package_for(self._protocol) if isinstance(error, ImportError) else None
                remedy = f"pip install {package}" if package else "use a path, or a URL that fsspec knows"
                message = f'snapshots.uri "{self.uri}" cannot be opened: {self._text(error)}'
                raise StorageError(message, remedy) from None
            self._pid = os.getpid()
        return self._store

    def _text(self, error: BaseException) -> str:
        """Return class and first line of *error* without secrets; further lines are the server's error page."""
        lines = str(error).strip().splitlines() or [""]
        return self._mask(f"{type(error).__name__}: {lines[0]}")

    def _mask(self, text: str) -> str:
        return redaction.mask(text, self._given, self._options)
