"""A client of the control store that a supervisor, or `elasticflow rendezvous serve`, serves by TCP.

Needs no torch, so that neither the supervisor nor the agents have to import it. Both sides prove first that they know the
launch's token (`protocol/handshake.py`). Then they send frames: four bytes of length, one byte for the kind (`Request` or `Answer`), and parts, each
after four bytes of its length. A connection has one request under way at a time; the server sends changes to a
connection that watches.

A server that keeps its keys on disk names them (`Request.STATE`). Its clients wait while it is away, and then continue;
a request without an answer is sent again, and carried out once.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

from elasticflow.protocol.handshake import greet, received
from elasticflow.protocol.store_address import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.protocol.store_address import StoreAddress

# Bytes; the first four of a client that speaks something else may announce gigabytes.
_LONGEST_FRAME = 1 << 26
_LENGTH = struct.Struct("!I")
_GET_S = 300.0
_CONNECT_S = 10.0
_AGAIN_S = 0.2
# Seconds in which a server that keeps its keys has to be back.
AWAY_S = 60.0
# After so many seconds of silence the machine of such a server counts as gone, and another connection is made.
_IDLE_S, _PROBE_S, _PROBES, _UNHEARD_MS = 5, 1, 3, 6000
# Seconds for each try to reach the server: TCP's own tries come ever later.
_TRY_S = 2.0


class Request(enum.IntEnum):
    """A client's request."""

    SET = 1
    GET = 2
    ADD = 3
    CHECK = 4
    DELETE = 5
    WATCH = 6
    FORGET = 7
    STATE = 8


class Answer(enum.IntEnum):
    """A server's answer."""

    YES = 64
    NO = 65
    VALUE = 66
    CHANGED = 67
    REMOVED = 68


def frame(kind: Request | Answer, *parts: bytes) -> bytes:
    """Return the frame that carries *parts*."""
    body = bytes([kind]) + b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Makes frames of bytes as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, data: bytes) -> Iterator[tuple[int, list[bytes]]]:
        """Yield kind and parts of each frame that *data* completes.

        Raises:
            ValueError: the bytes received are no frame.
        """
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if not 1 <= length <= _LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._rest) < _LENGTH.size + length:
                return
            body = bytes(self._rest[_LENGTH.size : _LENGTH.size + length])
            del self._rest[: _LENGTH.size + length]
            yield body[0], _parts(body)


def _parts(body: bytes) -> list[bytes]:
    parts, at = [], 1
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise ValueError("a frame that ends inside a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ValueError("a frame that ends inside a part")
        parts.append(body[at : at + length])
        at += length
    return parts


class TcpControlStore:
    """The keys below an address; may be used by several threads.

    Args:
        address: The store's address, and the prefix of the keys.
        looks_at: First word of the keys that this process looks at often: the server sends their changes, so that their
            `check` and `get` see what it had a moment ago and cost no request. Empty: none.
        answer_s: Seconds within which the server has to answer.

    Attributes:
        close: Ends the connections; what this process has set stays.

    Raises:
        StoreLostError: no server answers at *address*, or another program does.
        TokenRefusedError: the server has another token than *address*.
    """

    def __init__(self, address: StoreAddress, looks_at: str = "", answer_s: float = 60.0) -> None:
        self._address, self._looks_at, self._answer_s = address, looks_at, answer_s
        self._lock = threading.Lock()
        self._connection = _Connection(address, answer_s)
        connections = [self._connection]
        if looks_at:
            connections.append(_Connection(address, answer_s))
            self._mirror = _Mirror(connections[1], self._path(f"{looks_at}/").decode())
        # The connections end with the last reference to this object, as those of torch's store do.
        self.close = weakref.finalize(self, _close, connections)

    @property
    def patience_s(self) -> float:
        """Seconds that a request may take, while the server is away, beyond those that an answer takes."""
        return AWAY_S if self._connection.state else 0.0

    def set(self, key: str, value: str | bytes) -> None:
        """Give *key* a value."""
        self._ask(Request.SET, self._path(key), value.encode() if isinstance(value, str) else value)

    def get(self, key: str, limit_s: float = _GET_S) -> bytes:
        """Return the value of *key*, once it has one.

        Raises:
            StoreLostError: it got none in time, or the store does not answer.
        """
        if self._is_mirrored(key):
            return self._mirror.await_value(self._path(key).decode(), limit_s)
        _, parts = self._ask(Request.GET, self._path(key), limit_s=limit_s)
        return parts[0]

    @property
    def own_address(self) -> str:
        """Address of this machine towards the store."""
        return str(self._connection.socket.getsockname()[0])

    def add(self, key: str, number: int) -> int:
        """Add *number* to the value of *key*, 0 at first, in one act; return the sum."""
        _, parts = self._ask(Request.ADD, self._path(key), str(number).encode(), os.urandom(16))
        return int(parts[0])

    def check(self, keys: list[str]) -> bool:
        """Return whether all *keys* have values, without waiting for any."""
        asked = []
        for key in keys:
            if not self._is_mirrored(key):
                asked.append(self._path(key))
            elif self._mirror.value(self._path(key).decode()) is None:
                return False
        return not asked or self._ask(Request.CHECK, *asked)[0] == Answer.YES

    def changed(self, folder: str) -> list[str] | None:
        """Return the keys below *folder*, which this process looks at, that were given a value since the last call.

        None at the first call: any may have been.
        """
        paths = self._mirror.changed(self._path(f"{folder}/").decode())
        start = len(self._path(""))
        return None if paths is None else [path[start:] for path in paths]

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return whether it was there."""
        return self._ask(Request.DELETE, self._path(key))[0] == Answer.YES

    def forget(self) -> None:
        """Remove all keys below the address's prefix."""
        self._ask(Request.FORGET, self._path(""))

    def _is_mirrored(self, key: str) -> bool:
        return self._looks_at == key.partition("/")[0]

    def _path(self, key: str) -> bytes:
        return f"{self._address.prefix}/{key}".encode()

    def _ask(self, request: Request, *parts: bytes, limit_s: float | None = None) -> tuple[int, list[bytes]]:
        with self._lock:
            while True:
                try:
                    return self._connection.ask(limit_s or self._answer_s, request, *parts)
                except (OSError, ValueError) as error:
                    # An error with a number is the kernel's: the server's machine does not answer any more.
                    if limit_s is not None and isinstance(error, TimeoutError) and error.errno is None:
                        # The key has no value.
                        self._connection.socket.close()
                        raise _lost(self._address, error) from error
                    self._connection.renew(error)


class _Connection:
    """A connection to the store at *address*, whose server has *answer_s* seconds to answer.

    Attributes:
        state: Names the keys that the server keeps; empty: it keeps none, and its clients cannot continue without it.

    Raises:
        StoreLostError: no server answers, or another program does.
        TokenRefusedError: the server has another token than *address*.
    """

    def __init__(self, address: StoreAddress, answer_s: float) -> None:
        self.address, self.answer_s = address, answer_s
        self._error: Exception | None = None
        self.state = self._open(answer_s, min(answer_s, _CONNECT_S))

    def ask(self, limit_s: float, request: Request, *parts: bytes) -> tuple[int, list[bytes]]:
        """Return kind and parts of the answer to *request*.

        Raises:
            OSError: no answer has come.
            ValueError: the bytes received are no answer.
        """
        self.socket.settimeout(limit_s)
        self.socket.sendall(frame(request, *parts))
        while True:
            for answer in self.frames.take(received(self.socket)):
                return answer

    def renew(self, error: OSError | ValueError) -> None:
        """Make another connection, once the server that keeps its keys is back after *error*.

        Raises:
            StoreLostError: it does not come back, or without these keys; or it keeps none.
        """
        # An answer that comes later would be taken for the answer to the next request.
        self.socket.close()
        self._error = self._error or error
        if not self.state or isinstance(error, ValueError):
            # The first error is the cause: a connection that is closed fails in other ways.
            raise _lost(self.address, self._error) from error
        if self._open(_TRY_S, AWAY_S) != self.state:
            self.socket.close()
            raise StoreLostError(
                f"the store at {self.address.endpoint} was started again, and does not know this launch: "
                "elasticflow rendezvous serve needs the --state that it had"
            )
        self._error = None

    def _open(self, try_s: float, limit_s: float) -> str:
        """Connect, and return the name of the keys that the server keeps; try again for *limit_s*: a link may flap, a server be away."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                with contextlib.ExitStack() as on_error:
                    self.socket = on_error.enter_context(_connect(self.address, try_s))
                    self.frames = Frames()
                    if state := self._state():
                        _notice_silence(self.socket)
                    on_error.pop_all()
                    return state
            except (OSError, ValueError) as error:
                if time.monotonic() + _AGAIN_S > deadline:
                    raise _lost(self.address, error) from error
                time.sleep(_AGAIN_S)

    def _state(self) -> str:
        _, parts = self.ask(min(self.answer_s, _CONNECT_S), Request.STATE, b"")
        return parts[0].decode()


class _Mirror:
    """A copy of the keys that begin with *prefix*, as far as the server has sent them over *connection*."""

    def __init__(self, connection: _Connection, prefix: str) -> None:
        self.connection, self._prefix = connection, prefix
        self._lock = threading.Lock()
        self._heard = 0
        self._begin()

    def _begin(self) -> None:
        """Ask for all keys and for every later change; return once all keys have come."""
        connection = self.connection
        self._values: dict[str, bytes] = {}
        # Paths that were given a value since they were asked for; None: any may have been.
        self._news: dict[str, None] | None = None
        self._is_whole = False
        # Not `select.select`, which takes no descriptor above 1023.
        self._poll = select.poll()
        self._poll.register(connection.socket, select.POLLIN)
        try:
            connection.socket.sendall(frame(Request.WATCH, self._prefix.encode()))
            deadline = time.monotonic() + connection.answer_s
            while not self._is_whole:
                self._receive(deadline - time.monotonic())
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer in {connection.answer_s:g} s")
        except (OSError, ValueError) as error:
            self._renew(error)

    def _renew(self, error: OSError | ValueError) -> None:
        self.connection.renew(error)
        self._begin()

    def value(self, path: str) -> bytes | None:
        """Return the value of *path*; None if it has none."""
        self._follow(0.0)
        return self._values.get(path)

    def await_value(self, path: str, limit_s: float) -> bytes:
        """Return the value of *path* once it has one, also if the store was lost after it sent the value."""
        if (value := self._values.get(path)) is not None:
            return value
        deadline = time.monotonic() + limit_s
        while (value := self.value(path)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _lost(self.connection.address, TimeoutError(f"no {path} in {limit_s:g} s"))
            self._follow(left)
        return value

    def changed(self, folder: str) -> list[str] | None:
        """Return the paths below *folder* that were given a value since the last call; None: any may have been."""
        self._follow(0.0)
        with self._lock:
            news, self._news = self._news, {}
        return None if news is None else [path for path in news if path.startswith(folder)]

    def _follow(self, limit_s: float) -> None:
        """Take in what the server has sent, waiting at most *limit_s* seconds for the first frame."""
        with self._lock:
            heard = self._heard
            try:
                self._receive(limit_s)
            except (OSError, ValueError) as error:
                # Frames that came before the end count; the next look finds again that the server is gone.
                if self._heard == heard:
                    self._renew(error)

    def _receive(self, limit_s: float) -> None:
        while self._poll.poll(max(0.0, limit_s) * 1000):
            for kind, parts in self.connection.frames.take(received(self.connection.socket)):
                self._take(kind, parts)
                self._heard += 1
            limit_s = 0.0

    def _take(self, kind: int, parts: list[bytes]) -> None:
        if kind == Answer.CHANGED:
            path = parts[0].decode()
            self._values[path] = parts[1]
            if self._news is not None:
                self._news[path] = None
        elif kind == Answer.REMOVED:
            self._values.pop(parts[0].decode(), None)
        else:
            self._is_whole = True


def _connect(address: StoreAddress, answer_s: float) -> socket.socket:
    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(
            socket.create_connection((address.host, address.port), timeout=answer_s)
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        greet(connection, address.token, address.endpoint)
        on_error.pop_all()
        return connection


def _notice_silence(connection: socket.socket) -> None:
    """Have the kernel end the connection when the machine at its other end does not answer any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)


def _close(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.socket.close()


def _lost(address: StoreAddress, error: Exception) -> StoreLostError:
    return StoreLostError(f"the store at {address.endpoint} does not answer: {error}")
