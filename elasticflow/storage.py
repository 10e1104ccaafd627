"""The only door to fsspec: commit-or-discard writes, exclusive create, no listing cache (floor 0).

Local folders are served without fsspec, so that a process that needs no other store never loads it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from elasticflow import durable, faults, secrecy
from elasticflow.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)(::|://).*", re.DOTALL)
_WITH_FOLDERS = frozenset({"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs"})
_PACKAGES = {  # what to install for a protocol
    "s3": '"elasticflow[s3]"', "s3a": '"elasticflow[s3]"', "http": '"elasticflow[http]"',
    "https": '"elasticflow[http]"', "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "sftp": "paramiko", "ssh": "sshfs",
}  # fmt: skip
_READ_BLOCK = 8 << 20


class Storage:
    """Files under one URI: a local folder, or anything fsspec reaches.

    Every method takes paths relative to the URI, with `/`. Failures are OSErrors of the fitting kind; what a
    back-end raises besides is turned into one, without secrets.

    Attributes:
        uri: The URI as given, with a password in it masked.
        is_local: True for paths and `file://`.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None) -> None:
        found = _URL.fullmatch(uri)
        self._given = uri
        self._options = dict(options or {})
        self._protocol = found["protocol"].lower() if found else "file"
        self.uri = secrecy.mask_url(uri)
        self.is_local = self._protocol in {"file", "local"}
        self._fs: Any = None
        self._root = ""
        self._pid = 0
        plain = re.sub(r"^(file|local)://", "", uri, flags=re.IGNORECASE)
        self._folder = Path(plain).expanduser().absolute()  # meaningless unless local

    @property
    def absolute_uri(self) -> str:
        """The URI with its secrets, meaning the same in every working directory; never to be shown."""
        return str(self._folder) if self.is_local else self._given

    def local_path(self, path: str = "") -> Path:
        """Return where *path* lies on this machine; only for local folders."""
        if not self.is_local:
            raise ValueError(f"{self.uri} is not a local folder")
        return self._folder / path if path else self._folder

    def write(self, path: str, parts: Iterable[durable.Part]) -> int:
        """Put *parts* at *path* and return their bytes; if it fails, nothing half written is at that name."""
        faults.reach("storage.write")
        if self.is_local:
            return durable.write(self.local_path(path), parts)
        with self._told():
            return self._write_remote(self._at(path, make_folder=True), parts)

    def create(self, path: str, data: bytes) -> bool:
        """Put *data* at *path* if nothing is there; True if this call made it, False if it was there.

        Exclusive on local disks, s3, gcs, abfs, sftp and memory. Source: fsspec 2026.9, `pipe_file(mode="create")`
        and mode "xb"; a back-end that knows neither only looks first.
        """
        faults.reach("storage.create")
        if self.is_local:
            return durable.create(self.local_path(path), data)
        with self._told():
            fs, place = self._filesystem(), self._at(path, make_folder=True)
            try:
                if self._protocol in _WITH_FOLDERS:
                    with fs.open(place, "xb") as file:
                        file.write(data)
                else:
                    fs.pipe_file(place, data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                if not fs.exists(place):  # sftp tells a taken name only as "Failure"
                    raise
                return False
            return True

    def replace_text(self, path: str, data: bytes) -> None:
        """Put the small file *data* at *path*, replacing what was there, in one act where the back-end can."""
        if self.is_local:
            durable.write(self.local_path(path), (data,))
            return
        with self._told():
            self._filesystem().pipe_file(self._at(path, make_folder=True), data)

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        faults.reach("storage.read")
        if self.is_local:
            return self.local_path(path).read_bytes()
        with self._told():
            return bytes(self._filesystem().cat_file(self._at(path)))

    def open_read(self, path: str) -> BinaryIO:
        """Return the file open for reading; the caller closes it."""
        faults.reach("storage.read")
        if self.is_local:
            return self.local_path(path).open("rb")
        with self._told():
            return cast("BinaryIO", self._filesystem().open(self._at(path), "rb", block_size=_READ_BLOCK))

    def exists(self, path: str) -> bool:
        """Return whether a file is there now, never from a cache; no answer is an error, not absence."""
        if self.is_local:
            return self.local_path(path).exists()
        with contextlib.suppress(FileNotFoundError), self._told():
            self._filesystem().invalidate_cache()
            self._filesystem().info(self._at(path))  # fsspec's own `exists` takes every error for absence
            return True
        return False

    def size(self, path: str) -> int:
        """Return the file's bytes."""
        if self.is_local:
            return self.local_path(path).stat().st_size
        with self._told():
            self._filesystem().invalidate_cache()
            return int(self._filesystem().size(self._at(path)))

    def list(self, folder: str = "") -> list[str]:
        """Return the names in *folder*, sorted; empty if there is no such folder."""
        try:
            if self.is_local:
                return sorted(path.name for path in self.local_path(folder).iterdir())
            with self._told():
                place = self._at(folder)
                self._filesystem().invalidate_cache()
                found = self._filesystem().ls(place, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some back-ends list the folder itself too.
        return sorted({f.rstrip("/").rpartition("/")[2] for f in found if f.strip("/") != place.strip("/")})

    def remove(self, path: str) -> None:
        """Remove the file; no error if it is absent."""
        faults.reach("storage.remove")
        with contextlib.suppress(FileNotFoundError):
            if self.is_local:
                self.local_path(path).unlink()
                return
            with self._told():
                self._filesystem().rm_file(self._at(path))

    def remove_tree(self, folder: str) -> None:
        """Remove the folder and all in it; no error if it is absent."""
        faults.reach("storage.remove")
        with contextlib.suppress(FileNotFoundError):
            if self.is_local:
                shutil.rmtree(self.local_path(folder))
                return
            with self._told():
                self._filesystem().invalidate_cache()
                self._filesystem().rm(self._at(folder), recursive=True)

    def check_writable(self) -> None:
        """Write, read and remove a small file.

        Raises:
            StorageError: that failed, or the package for this kind of URI is missing; names the URI and the cause.
        """
        probe = f".elasticflow-probe-{secrets.token_hex(4)}"
        try:
            self.write(probe, (b"probe",))
            back = self.read(probe)
            self.remove(probe)
            cause = None if back == b"probe" else "what was written is not what is read back"
        except OSError as error:
            cause = self._text(error)
        if cause is not None:
            where = (
                "that the folder exists and may be written"
                if self.is_local
                else "the address and its credentials"
            )
            remedy = f"check {where}, or set snapshots.uri to another place"
            raise StorageError(f'snapshots.uri "{self.uri}" cannot be written: {cause}', remedy)

    def _write_remote(self, place: str, parts: Iterable[durable.Part]) -> int:
        fs = self._filesystem()
        was_there = fs.exists(place)
        file = fs.open(place, "wb", block_size=_READ_BLOCK, autocommit=False)
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
            if not was_there:
                with contextlib.suppress(Exception):
                    fs.rm_file(place)
            raise
        return size

    def _at(self, path: str, *, make_folder: bool = False) -> str:
        fs = self._filesystem()
        place = f"{self._root.rstrip('/')}/{path}" if path else self._root
        if make_folder and self._protocol in _WITH_FOLDERS:
            fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        return place

    def _filesystem(self) -> Any:
        if self._fs is None or self._pid != os.getpid():  # asynchronous file systems do not survive a fork
            import fsspec.core

            extra: dict[str, Any] = {"skip_instance_cache": True}
            if self._protocol not in {"sftp", "ssh"}:  # these hand every option on to the ssh client
                extra["use_listings_cache"] = False  # a cached listing hides what another process wrote
            try:
                self._fs, self._root = fsspec.core.url_to_fs(self._given, **{**self._options, **extra})
            except (ImportError, ValueError) as error:
                package = _PACKAGES.get(self._protocol) if isinstance(error, ImportError) else None
                remedy = f"pip install {package}" if package else "use a path, or a URL that fsspec knows"
                message = f'snapshots.uri "{self.uri}" cannot be opened: {self._text(error)}'
                raise StorageError(message, remedy) from None
            self._pid = os.getpid()
        return self._fs

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StorageError):
            raise
        except Exception as error:
            raise OSError(self._text(error)) from error

    def _text(self, error: BaseException) -> str:
        text = f"{type(error).__name__}: {error}".replace(self._given, self.uri)
        return secrecy.mask_options(text, self._options)
