"""The control store of a launch in etcd, by its v2 API.

torch 2.13 has an `EtcdStore` of its own. It reads a whole folder for every look at one key, has no `delete_key`, and a
lost connection ends it; agents and the supervisor look hundreds of times a second. Here a process that looks often keeps
a copy of the folder, and etcd's own watch keeps the copy up to date.

Keys and values are base64, so that they may hold anything: etcd hides names that begin with an underscore.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import etcd

from elasticflow.protocol.store_address import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.protocol.store_address import StoreAddress

# An election among etcd's members, or the restart of a lone one.
PATIENCE_S = 10.0
_REQUEST_S = 5.0
_WATCH_S = 5.0
_AGAIN_S = 0.1
_LOOK_S = 0.005
_GET_S = 300.0
# Errors that are etcd's answer: asking again would not change it.
_ANSWERS = (
    etcd.EtcdKeyError,  # absent, there already, or no folder
    etcd.EtcdValueError,  # another value than expected
    etcd.EtcdEventIndexCleared,
    etcd.EtcdWatchTimedOut,
)
# The library logs every request that fails, also those that are tried again.
logging.getLogger("etcd").addHandler(logging.NullHandler())
logging.getLogger("etcd").propagate = False


class EtcdControlStore:
    """The keys below an address.

    Args:
        address: The address of etcd, and the prefix of the keys.
        looks_at: First word of the keys that this process looks at often: their `check` and `get` see what etcd had a
            moment ago, and cost no request. Empty: none.
        patience_s: How long a lost connection is tried again.
    """

    def __init__(self, address: StoreAddress, looks_at: str = "", patience_s: float = PATIENCE_S) -> None:
        self._address, self._patience_s = address, patience_s
        self._client = _client(address)
        self._looks_at = looks_at
        if looks_at:
            self._mirror = _Mirror(_client(address), f"/{address.prefix}/{looks_at}", patience_s)

    @property
    def patience_s(self) -> float:
        """Seconds that a request may take while etcd is away; less than the silence for which a process counts as lost."""
        return 0.0

    @property
    def own_address(self) -> str:
        """Address of this machine towards etcd.

        Raises:
            StoreLostError: etcd does not answer.
        """
        try:
            address = (self._address.host, self._address.port)
            with socket.create_connection(address, timeout=self._patience_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise StoreLostError(f"etcd at {self._address.endpoint} does not answer: {error}") from error

    def set(self, key: str, value: str | bytes) -> None:
        """Give *key* a value."""
        self._ask(self._client.write, self._path(key), _text(value))

    def get(self, key: str, limit_s: float = _GET_S) -> bytes:
        """Return the value of *key*, once it has one.

        Raises:
            StoreLostError: it got none in time, or etcd does not answer.
        """
        deadline = time.monotonic() + limit_s
        pause = _LOOK_S
        while (value := self._look(key)) is None:
            if time.monotonic() > deadline:
                raise StoreLostError(f"no {key} in etcd at {self._address.endpoint} after {limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _AGAIN_S)
        return value

    def add(self, key: str, number: int) -> int:
        """Add *number* to the value of *key*, 0 at first, in one act; return the sum."""
        path = self._path(key)
        while True:
            try:
                before = self._ask(self._client.read, path).value
            except etcd.EtcdKeyNotFound:
                total, expected = number, {"prevExist": False}
            else:
                total, expected = int(_bytes(before)) + number, {"prevValue": before}
            try:
                self._ask(self._client.write, path, _text(str(total)), **expected)
            except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed):  # another process came first
                continue
            return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all *keys* have values, without waiting for any."""
        return all(self._look(key) is not None for key in keys)

    def changed(self, folder: str) -> None:
        """Return None: any key may have been given a value."""

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return whether it was there."""
        try:
            self._ask(self._client.delete, self._path(key))
        except etcd.EtcdKeyNotFound:
            return False
        return True

    def forget(self) -> None:
        """Remove all keys below the address's prefix."""
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            self._ask(self._client.delete, f"/{self._address.prefix}", recursive=True)

    def _look(self, key: str) -> bytes | None:
        if key.partition("/")[0] == self._looks_at:
            return self._mirror.value(self._path(key))
        try:
            return _bytes(self._ask(self._client.read, self._path(key)).value)
        except etcd.EtcdKeyNotFound:
            return None

    def _path(self, key: str) -> str:
        """Return the path of *key*: the folder is its first word, the name there all of it."""
        name = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        return f"/{self._address.prefix}/{key.partition('/')[0]}/k{name}"

    def _ask(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return request(*args, **options)
            except _ANSWERS:
                raise
            except etcd.EtcdException as error:
                if time.monotonic() > deadline:
                    raise StoreLostError(
                        f"etcd at {self._address.endpoint} does not answer: {error}"
                    ) from error
                time.sleep(_AGAIN_S)


class _Mirror:
    """A copy of a folder, kept up to date by a thread that ends with this object."""

    def __init__(self, client: Any, folder: str, patience_s: float) -> None:
        self._client, self._folder, self._patience_s = client, folder, patience_s
        self._values: dict[str, bytes] = {}
        self._is_current = threading.Event()
        threading.Thread(
            target=_follow, args=(weakref.ref(self),), daemon=True, name=f"etcd {folder}"
        ).start()

    def value(self, path: str) -> bytes | None:
        """Return the value of *path*, None if it has none; waits while etcd does not answer.

        Raises:
            StoreLostError: etcd has not answered for too long.
        """
        if not self._is_current.wait(self._patience_s):
            raise StoreLostError(f"etcd has not answered for {self._patience_s:g} s")
        return self._values.get(path)

    def advance(self, index: int | None) -> int | None:
        """Wait for the next change and take it into the copy.

        Args:
            index: The index of etcd's state that the copy has; None: read the whole folder.

        Returns:
            The index that the copy has then, or None if the whole folder has to be read.
        """
        try:
            if index is not None:
                return self._next_change(index)
            index = self._read_all()
        except etcd.EtcdEventIndexCleared:  # etcd remembers a thousand changes, of all folders
            return None
        except etcd.EtcdException:
            self._is_current.clear()
            time.sleep(_AGAIN_S)
            return None
        self._is_current.set()
        return index

    def _read_all(self) -> int:
        """Copy the whole folder; return the index of etcd's state that the copy has then."""
        try:
            folder = self._client.read(self._folder, recursive=True)
        except etcd.EtcdKeyNotFound as error:
            self._values = {}
            return int(error.payload["index"])
        self._values = {leaf.key: _bytes(leaf.value) for leaf in folder.leaves if not leaf.dir}
        return int(folder.etcd_index)

    def _next_change(self, index: int) -> int:
        try:
            change = self._client.watch(self._folder, index=index + 1, timeout=_WATCH_S, recursive=True)
        except etcd.EtcdWatchTimedOut:
            return index
        if change.dir:  # the folder was removed with all that was in it
            self._values = {}
        elif change.value is None:
            self._values.pop(change.key, None)
        else:
            self._values[change.key] = _bytes(change.value)
        return int(change.modifiedIndex)


def _follow(reference: weakref.ref[_Mirror]) -> None:
    """Keep a mirror up to date for as long as it is used."""
    index = None
    while (mirror := reference()) is not None:
        index = mirror.advance(index)
        del mirror


def _client(address: StoreAddress) -> Any:
    options = address.options
    certificate = options.get("ssl_cert")
    key = options.get("ssl_cert_key")
    return etcd.Client(
        address.host,
        address.port,
        protocol=options.get("protocol", "http"),
        cert=(certificate, key) if certificate and key else certificate,
        ca_cert=options.get("ca_cert"),
        read_timeout=_REQUEST_S,
    )


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
