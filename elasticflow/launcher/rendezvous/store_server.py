"""The control store of a launch, served by a thread of this process by the protocol of `protocol/tcp_store.py`."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StorageError
from elasticflow.launcher.rendezvous import descriptors
from elasticflow.launcher.rendezvous.key_table import KeyTable, Subscriptions
from elasticflow.launcher.rendezvous.refusals import Refusals
from elasticflow.protocol.handshake import ServerSide, StrangerError
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.protocol.tcp_store import Answer, Frames, Request, frame

if TYPE_CHECKING:
    from elasticflow.launcher.rendezvous.kept_keys import KeptKeys

_MOST_AT_ONCE = 1 << 16
# Connections that are accepted before others are heard again: all nodes of a launch may come at a time.
_MOST_ACCEPTED = 64
# Bytes that wait for a client that does not read; beyond that it is let go.
_MOST_WAITING = 1 << 28
# Connections whose handshake is under way, and the seconds that each has for it: strangers hold no more than that.
_MOST_GREETING = 1024
_GREETING_S = 10.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(eq=False)
class _Client:
    """A connection, and what is under way on it."""

    connection: socket.socket
    address: str
    handshake: ServerSide
    frames: Frames = field(default_factory=Frames)
    began: float = field(default_factory=time.monotonic)
    unsent: bytearray = field(default_factory=bytearray)
    is_stuck: bool = False  # what is unsent waits until it reads


class StoreServer:
    """Serves keys on *listener* as long as this process lives, or until `close`.

    All methods but `close` raise StoreLostError once the server has ended.

    Args:
        listener: A listening socket.
        token: What clients have to know; empty: nothing.
        kept: Where the keys are kept; None: in this process' memory alone. Closed with the server.

    Attributes:
        refusals: Connections that were refused.
        failure: Why the keys could not be kept any more, which ends the server.
    """

    def __init__(self, listener: socket.socket, token: str = "", kept: KeptKeys | None = None) -> None:
        self._token, self._kept = token, kept
        self.failure: str | None = None
        self.refusals = Refusals()
        # In the order in which they came.
        self._greeting: dict[_Client, None] = {}
        self._keys = KeyTable()
        for path, value in () if kept is None else kept.load().items():
            self._keys.put(path, value)
        self._changed = threading.Condition()
        self._clients: dict[_Client, None] = {}
        # A change is told to those whom it concerns, and costs nothing for all others.
        self._subscriptions: Subscriptions[_Client] = Subscriptions()
        # Paths that were given a value since this process asked last what is new in a folder.
        self._news: dict[str, dict[str, None]] = {}
        # Paths that have changed and that clients have not been told of.
        self._untold: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._listener = listener
        for connection in (listener, self._wake_read, self._wake_write):
            connection.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_over = False
        self._accepts = True
        descriptors.allow_many()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="keys")
        self._thread.start()

    def store(self, prefix: str) -> LocalControlStore:
        """Return the keys below *prefix* for this process."""
        return LocalControlStore(self, prefix)

    @property
    def is_serving(self) -> bool:
        """Whether clients are answered."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Serve no more: clients see their connection end."""
        self._is_over = True
        self._wake()
        self._thread.join()

    def set(self, path: str, value: bytes) -> None:
        """Give *path* a value."""
        with self._changed:
            self._require_served()
            self._put(path, value)
        self._wake()

    def get(self, path: str) -> bytes:
        """Return the value of *path*, once it has one."""
        with self._changed:
            self._changed.wait_for(lambda: path in self._keys or self._is_over)
            self._require_served()
            return self._keys[path]

    def add(self, path: str, number: int) -> int:
        """Add *number* to the value of *path*, 0 at first; return the sum."""
        with self._changed:
            self._require_served()
            total = int(self._keys.get(path) or b"0") + number
            self._put(path, str(total).encode())
        self._wake()
        return total

    def _add_once(self, path: str, number: int, request: bytes) -> int:
        """Do as `add`, unless *request* was done before: a client that has got no answer asks again."""
        if self._kept is None:
            return self.add(path, number)
        if (done := self._kept.sum_of(request)) is not None:
            return done
        total = int(self._keys.get(path) or b"0") + number
        self._kept.put_sum(path, total, request)
        with self._changed:
            self._note(path, str(total).encode())
        return total

    def has(self, path: str) -> bool:
        """Return whether *path* has a value."""
        with self._changed:
            self._require_served()
            return path in self._keys

    def delete(self, path: str) -> bool:
        """Remove *path*; return whether it was there."""
        with self._changed:
            self._require_served()
            was_there = self._keys.delete(path)
            if was_there:
                if self._kept is not None:
                    self._kept.delete(path)
                self._untold.append(path)
        self._wake()
        return was_there

    def changed(self, folder: str) -> list[str] | None:
        """Return the paths that begin with *folder* and were given a value since the last call; None at the first."""
        with self._changed:
            self._require_served()
            news = self._news.get(folder)
            self._news[folder] = {}
            return None if news is None else list(news)

    def _require_served(self) -> None:
        if self._is_over and threading.current_thread() is not self._thread:
            raise StoreLostError("the thread that served the launch's keys has ended")

    def _put(self, path: str, value: bytes) -> None:
        if self._kept is not None:
            self._kept.put(path, value)
        self._note(path, value)

    def _note(self, path: str, value: bytes) -> None:
        self._keys.put(path, value)
        for folder, news in self._news.items():
            if path.startswith(folder):
                news[path] = None
        self._untold.append(path)
        self._changed.notify_all()

    def _wake(self) -> None:
        if threading.current_thread() is not self._thread:
            with suppress(OSError):  # the thread is woken up already, or has ended
                self._wake_write.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._is_over:
                for key, happened in self._selector.select(self._until_next_is_late()):
                    if key.fileobj is self._listener:
                        self._accept_all()
                    elif key.fileobj is self._wake_read:
                        with suppress(BlockingIOError):
                            self._wake_read.recv(_MOST_AT_ONCE)
                    else:
                        self._hear(key.data, happened)
                self._drop_late()
                self._tell_changes()
        except StorageError as error:
            # Nobody may be told that something was done which the next server would not know.
            self.failure = str(error)
        finally:  # also when memory is short: clients that wait must see that no answer will come
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            for connection in (self._listener, self._wake_read, self._wake_write):
                connection.close()
            if self._kept is not None:
                self._kept.close()

    def _accept_all(self) -> None:
        """Accept the clients that have come, as far as others need not wait for that."""
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No more until a client goes: the listener would be ready all the time. After other errors the client is gone.
                if error.errno in _NO_DESCRIPTORS:
                    self._selector.unregister(self._listener)
                    self._accepts = False
                    self.refusals.note("another machine", descriptors.exhausted())
                    return
                continue
            self._begin(connection, address)

    def _begin(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection, str(address[0]).removeprefix("::ffff:"), ServerSide(self._token))
        if len(self._greeting) >= _MOST_GREETING:
            self._refuse(next(iter(self._greeting)), "too many came at a time")
        self._clients[client] = None
        self._greeting[client] = None
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _hear(self, client: _Client, happened: int) -> None:
        try:
            if happened & selectors.EVENT_WRITE:
                self._send(client, b"")
            if happened & selectors.EVENT_READ:
                data = client.connection.recv(_MOST_AT_ONCE)
                if not data:
                    self._drop(client)
                    return
                for kind, parts in client.frames.take(self._after_greeting(client, data)):
                    self._answer(client, Request(kind), parts)
        except BlockingIOError:
            return
        except StrangerError as stranger:
            with suppress(OSError):
                self._send(client, stranger.answer)
            self._refuse(client, str(stranger))
        except (OSError, ValueError, IndexError):  # gone, or no client of ours
            self._drop(client)

    def _after_greeting(self, client: _Client, data: bytes) -> bytes:
        """Return what of *data* follows the client's handshake, and answer that."""
        if client.handshake.is_done:
            return data
        answer, rest = client.handshake.take(data)
        if client.handshake.is_done:
            del self._greeting[client]
        self._send(client, answer)
        return rest

    def _until_next_is_late(self) -> float | None:
        """Return the seconds until the time of the handshake that began first is over; None if none is under way."""
        client = next(iter(self._greeting), None)
        return None if client is None else max(0.0, client.began + _GREETING_S - time.monotonic())

    def _drop_late(self) -> None:
        while self._until_next_is_late() == 0:
            self._refuse(next(iter(self._greeting)), f"it did not say who it is within {_GREETING_S:g} s")

    def _refuse(self, client: _Client, why: str) -> None:
        self.refusals.note(client.address, why)
        self._drop(client)

    def _answer(self, client: _Client, request: Request, parts: list[bytes]) -> None:
        path = parts[0].decode()
        match request:
            case Request.SET:
                self.set(path, parts[1])
                self._send(client, frame(Answer.YES))
            case Request.GET:
                self._give_later(client, path)
            case Request.ADD:
                total = self._add_once(path, int(parts[1]), parts[2])
                self._send(client, frame(Answer.VALUE, str(total).encode()))
            case Request.CHECK:
                has_all = all(part.decode() in self._keys for part in parts)
                self._send(client, frame(Answer.YES if has_all else Answer.NO))
            case Request.DELETE:
                self._send(client, frame(Answer.YES if self.delete(path) else Answer.NO))
            case Request.WATCH:
                self._begin_watch(client, path)
            case Request.STATE:
                state = "" if self._kept is None else self._kept.state
                self._send(client, frame(Answer.VALUE, state.encode()))
            case Request.FORGET:
                for below, _ in self._below(path):
                    self.delete(below)
                self._send(client, frame(Answer.YES))

    def _begin_watch(self, client: _Client, prefix: str) -> None:
        for path, value in self._below(prefix):
            self._send(client, _change(path, value))
        # Only now: changes from here on have to follow the values that were there.
        self._subscriptions.watch(client, prefix)
        self._send(client, frame(Answer.YES))

    def _below(self, prefix: str) -> list[tuple[str, bytes]]:
        """Return paths under *prefix* with their values; this process' other threads may change them at any time."""
        with self._changed:
            return self._keys.below(prefix)

    def _give_later(self, client: _Client, path: str) -> None:
        """Answer with the value of *path*, now or once it has one."""
        value = self._keys.get(path)
        if value is None:
            self._subscriptions.wait(client, path)
        else:
            self._send(client, frame(Answer.VALUE, value))

    def _tell_changes(self) -> None:
        with self._changed:
            changed = [(path, self._keys.get(path)) for path in dict.fromkeys(self._untold)]
            self._untold = []
        news: dict[_Client, list[bytes]] = {}
        for path, value in changed:
            if value is not None:
                for client in self._subscriptions.take_waiting(path):
                    news.setdefault(client, []).append(frame(Answer.VALUE, value))
            data = b""
            for client in self._subscriptions.watching(path):
                data = data or _change(path, value)
                news.setdefault(client, []).append(data)
        for client, frames in news.items():
            try:
                self._send(client, b"".join(frames))
            except OSError:
                self._drop(client)

    def _send(self, client: _Client, data: bytes) -> None:
        client.unsent += data
        if client.unsent:
            with suppress(BlockingIOError):
                sent = client.connection.send(client.unsent)
                del client.unsent[:sent]
        if len(client.unsent) > _MOST_WAITING:
            raise BrokenPipeError("it does not read")
        if client.is_stuck != bool(client.unsent):
            client.is_stuck = bool(client.unsent)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.is_stuck else 0)
            self._selector.modify(client.connection, wanted, client)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            del self._clients[client]
            self._greeting.pop(client, None)
            self._subscriptions.leave(client)
            self._selector.unregister(client.connection)
            client.connection.close()
            if not self._accepts and not self._is_over:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._accepts = True


class LocalControlStore:
    """The keys below *prefix* for the process that serves them: `ControlStore` without a connection."""

    def __init__(self, server: StoreServer, prefix: str) -> None:
        self._server, self._prefix = server, prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Give *key* a value."""
        self._server.set(f"{self._prefix}/{key}", value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return the value of *key*, once it has one."""
        return self._server.get(f"{self._prefix}/{key}")

    def add(self, key: str, number: int) -> int:
        """Add *number* to the value of *key*, 0 at first; return the sum."""
        return self._server.add(f"{self._prefix}/{key}", number)

    def check(self, keys: list[str]) -> bool:
        """Return whether all *keys* have values."""
        return all(self._server.has(f"{self._prefix}/{key}") for key in keys)

    def changed(self, folder: str) -> list[str] | None:
        """Return the keys below *folder* that were given a value since the last call; None at the first."""
        paths = self._server.changed(f"{self._prefix}/{folder}/")
        return None if paths is None else [path[len(self._prefix) + 1 :] for path in paths]

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return whether it was there."""
        return self._server.delete(f"{self._prefix}/{key}")


def _change(path: str, value: bytes | None) -> bytes:
    """Return the frame that tells watching clients that *path* has *value* now; None: it was removed."""
    if value is None:
        return frame(Answer.REMOVED, path.encode())
    return frame(Answer.CHANGED, path.encode(), value)
