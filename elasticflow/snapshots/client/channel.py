"""A local socket between a worker and its node's writer: messages behind their length, and descriptors."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from elasticflow.snapshots.client.messages import TO_WORKER, TO_WRITER
from elasticflow.system.polling import readable

if TYPE_CHECKING:
    from elasticflow.protocol.json_codec import MessageCodec
    from elasticflow.snapshots.client.messages import ToWorker, ToWriter

Sent = TypeVar("Sent")
Received = TypeVar("Received")

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
# Linux takes 253 descriptors with a message.
_MOST_DESCRIPTORS = 250


class Channel(Generic[Sent, Received]):
    """One end of a connection; any thread may send, one thread receives."""

    def __init__(
        self, connection: socket.socket, sent: MessageCodec[Sent], received: MessageCodec[Received]
    ) -> None:
        self._socket, self._sent, self._received = connection, sent, received
        self._send_lock = threading.Lock()
        self._data = bytearray()
        self.descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, for select."""
        return self._socket.fileno()

    def send(self, message: Sent, descriptors: tuple[int, ...] = ()) -> None:
        """Send *message*, and *descriptors* with its first bytes.

        Raises:
            OSError: the other side is gone.
            ValueError: a number in it is infinite or NaN.
        """
        body = self._sent.encode(message, allow_nan=False).encode()
        frame = _LENGTH.pack(len(body)) + body
        with self._send_lock:
            for first in range(0, len(descriptors), _MOST_DESCRIPTORS):
                some = descriptors[first : first + _MOST_DESCRIPTORS]
                socket.send_fds(self._socket, [frame[:1]], some)
                frame = frame[1:]
            self._socket.sendall(frame)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message, or None when the other side is gone; its descriptors are in `descriptors`.

        Raises:
            TimeoutError: no whole message came in time.
        """
        self._socket.settimeout(timeout_s)
        try:
            while (message := self._take()) is None:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_DESCRIPTORS)
                except ConnectionError:
                    return None
                self.descriptors.extend(descriptors)
                if not data:
                    return None
                self._data += data
        except BlockingIOError:
            # A socket with a timeout of 0 raises this instead of TimeoutError.
            raise TimeoutError from None
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        return message

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether `receive` has something to read, or sees the end, within *timeout_s*; reads nothing."""
        return self._has_message() or bool(readable([self.fileno()], timeout_s))

    def close(self) -> None:
        """Close the connection; the other side sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _has_message(self) -> bool:
        if len(self._data) < _LENGTH.size:
            return False
        return len(self._data) >= _LENGTH.size + int(_LENGTH.unpack_from(self._data)[0])

    def _take(self) -> Received | None:
        if not self._has_message():
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
        message = self._received.decode(bytes(self._data[_LENGTH.size : end]))
        del self._data[:end]
        return message


def listen() -> tuple[socket.socket, str]:
    """Return a listening socket and its address: `@name` without a file on Linux, else a path in a private folder."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"elasticflow-{os.getpid()}-{secrets.token_hex(8)}"
    address = f"@{name}" if sys.platform == "linux" else str(Path(tempfile.mkdtemp(prefix="ef-")) / "writer")
    server.bind(_socket_address(address))
    server.listen(128)
    return server, address


def connect(address: str, timeout_s: float) -> Channel[ToWriter, ToWorker]:
    """Return a worker's channel to the writer at *address*.

    Raises:
        OSError: no writer listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(_socket_address(address))
    except OSError:
        connection.close()
        raise
    return Channel(connection, TO_WRITER, TO_WORKER)


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer runs as this user: an address without a file has no permissions."""
    if sys.platform != "linux":
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def _socket_address(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address
