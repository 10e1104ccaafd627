"""sftp, through asyncssh.

fsspec has two libraries for sftp: paramiko waits after each 32 kB of a write and never checks the host's key; sshfs, once
installed, takes the place of paramiko and overwrites files in exclusive mode. Neither is used: asyncssh is called
directly, so it does not matter what else is installed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from elasticflow.storage.store import pieces
from elasticflow.system.atomic_files import temporary_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from elasticflow.system.atomic_files import Part

T = TypeVar("T")

# A server that does not answer is given up after about a minute, also in the middle of a transfer.
_LIMITS = {"connect_timeout": 10, "login_timeout": 30, "keepalive_interval": 15, "keepalive_count_max": 3}


class SftpStore:
    """Files below a folder of an ssh server; see `Store`.

    A file is written under a hidden name and renamed. `create` makes a hard link instead, which fails where the name is
    taken. One connection serves all threads; it is made when it is first needed, and again after it broke.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        given = {"username": parts.username, "password": parts.password, "port": parts.port}
        given = {name: unquote(v) if isinstance(v, str) else v for name, v in given.items() if v}
        self._options = {"host": parts.hostname or "", **_LIMITS, **given, **options}
        # As in scp, `/~/x` is in the user's home: a session begins there.
        self._root = unquote(parts.path).removeprefix("/~/").rstrip("/") or "/"
        self._client: Any = None
        self._connection: Any = None
        self._connecting: Any = None

    def write(self, path: str, parts: Iterable[Part]) -> int:
        """See Store."""
        target = self._at(path)
        temporary = self._fill(target, parts)
        try:
            size = int(self._do(lambda client: client.getsize(temporary)))
            self._do(lambda client: client.posix_rename(temporary, target))
        except BaseException:
            self._drop(temporary)
            raise
        return size

    def create(self, path: str, data: bytes) -> None:
        """See Store."""
        target = self._at(path)
        temporary = self._fill(target, (data,))
        try:
            self._do(lambda client: client.link(temporary, target))
        except Exception:
            # Where the name is taken, the server's answer is only "Failure".
            if self.exists(path):
                raise FileExistsError(path) from None
            raise
        finally:
            self._drop(temporary)

    def read(self, path: str) -> bytes:
        """See Store."""
        return self._read(path, -1, 0)

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """See Store."""
        return self._read(path, size, start)

    def open_read(self, path: str) -> None:
        """See Store."""

    def size(self, path: str) -> int:
        """See Store."""
        return int(self._do(lambda client: client.getsize(self._at(path))))

    def modified(self, path: str) -> float:
        """See Store."""
        return float(self._do(lambda client: client.getmtime(self._at(path))))

    def exists(self, path: str) -> bool:
        """See Store."""
        return bool(self._do(lambda client: client.exists(self._at(path))))

    def list(self, folder: str) -> list[str]:
        """See Store."""
        names = self._do(lambda client: client.listdir(self._at(folder)))
        return [str(name) for name in names if name not in {".", ".."}]

    def remove(self, path: str) -> None:
        """See Store."""
        self._do(lambda client: client.remove(self._at(path)))

    def remove_tree(self, folder: str) -> None:
        """See Store."""
        target = self._at(folder)
        if not self.exists(folder):
            raise FileNotFoundError(folder)
        self._do(lambda client: client.rmtree(target))

    def _at(self, path: str) -> str:
        return str(PurePosixPath(self._root, path))

    def _read(self, path: str, size: int, start: int) -> bytes:
        async def read(client: Any) -> bytes:
            async with client.open(self._at(path), "rb", encoding=None) as file:
                return bytes(await file.read(size, start))

        return self._do(read)

    def _fill(self, target: str, parts: Iterable[Part]) -> str:
        """Write *parts* to a new hidden file beside *target*, flush it to the server's disk, and return its path."""
        folder, _, name = target.rpartition("/")
        temporary = str(PurePosixPath(folder, temporary_name(name)))

        async def begin(client: Any) -> Any:
            await client.makedirs(folder or ".", exist_ok=True)
            return await client.open(temporary, "xb", encoding=None)

        file = self._do(begin)
        try:
            for piece in pieces(parts):
                data = bytes(piece)
                self._do(lambda _, data=data: file.write(data))  # type: ignore[misc]
            self._do(lambda _: _finish(file))
        except BaseException:
            with suppress(Exception):
                self._do(lambda _: file.close())
            self._drop(temporary)
            raise
        return temporary

    def _drop(self, temporary: str) -> None:
        with suppress(Exception):
            self._do(lambda client: client.remove(temporary))

    def _do(self, operation: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result of *operation*, which runs on the connection, in the thread of fsspec's event loop."""
        from fsspec import asyn

        result: T = asyn.sync(asyn.get_loop(), self._run, operation)
        return result

    async def _run(self, operation: Callable[[Any], Awaitable[T]]) -> T:
        client = await self._connected()
        try:
            return await operation(client)
        except Exception as error:
            is_lost = type(error).__name__ in {"ConnectionLost", "SFTPConnectionLost", "SFTPNoConnection"}
            if is_lost and self._client is client:
                self._connection.abort()
                self._client = self._connection = None
            raise

    async def _connected(self) -> Any:
        """Return the connection's client; of several callers at once, one connects and the others wait."""
        import asyncio

        self._connecting = self._connecting or asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                import asyncssh

                self._connection = await asyncssh.connect(**self._options)
                self._client = await self._connection.start_sftp_client()
        return self._client


async def _finish(file: Any) -> None:
    """Flush the file to the server's disk, if the server supports that, and close it."""
    from asyncssh import SFTPOpUnsupported

    with suppress(SFTPOpUnsupported):
        await file.fsync()
    await file.close()
