"""The control store of a launch, served by a thread of this process by the protocol of `protocol/tcp_store.py`."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StorageError
from elasticflow.launcher.rendezvous import connections
from elasticflow.launcher.rendezvous.connections import Refusals
from elasticflow.launcher.rendezvous.key_table import KeyTable, Subscriptions
from elasticflow.protocol.handshake import ServerSide, StrangerError
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.protocol.tcp_store import Answer, Frames, Request, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.rendezvous.kept_keys import KeptKeys

# Bytes that wait for a client that does not read; beyond that its connection is cut. There is no time limit: a client
# that was stopped for a while, or whose machine slept, finds all changes when it resumes.
_MOST_WAITING = 1 << 28
# Connections whose handshake is under way, and the seconds that each has for it: strangers hold no more than that.
_MOST_GREETING = 1024
_GREETING_S = 10.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_ACCEPT_AGAIN_S = 0.5


class _Client(asyncio.BufferedProtocol):
    """A connection, and what is under way on it.

    Buffered: `asyncio.Protocol` takes and frees 256 KiB for each piece that arrives, in three system calls.
    """

    transport: asyncio.Transport

    def __init__(self, server: StoreServer, address: str, token: str) -> None:
        self._server = server
        self.address = address
        self.handshake = ServerSide(token)
        self.frames = Frames()
        self.is_stuck = False  # what was sent to it waits until it reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.greet(self)

    def get_buffer(self, _: int) -> bytearray:
        return self._server.arriving

    def buffer_updated(self, nbytes: int) -> None:
        self._server.hear(self, bytes(memoryview(self._server.arriving)[:nbytes]))

    def connection_lost(self, _: Exception | None) -> None:
        self._server.drop(self)

    def pause_writing(self) -> None:
        self.is_stuck = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_stuck = False
        self.transport.resume_reading()
        self._server.hear(self, b"")


class StoreServer:
    """Serves keys on *listener* as long as this process lives, or until `close`.

    An asyncio loop in a thread serves the clients, which call `greet`, `hear` and `drop`; this process' other threads
    use the keys directly, under a lock. Their methods, but `close`, raise StoreLostError once the server has ended.

    Args:
        token: Secret that clients have to know; empty: any client may connect.
        kept: The keys on disk; None: they are in this process' memory alone. Closed with the server.

    Attributes:
        refusals: Connections that were refused.
        failure: Why the keys could not be kept any more, which ends the server.
        arriving: Buffer of all clients: arrived bytes are taken out at once.
    """

    def __init__(self, listener: socket.socket, token: str = "", kept: KeptKeys | None = None) -> None:
        self._token, self._kept = token, kept
        self.failure: str | None = None
        self.refusals = Refusals()
        self._keys = KeyTable()
        for path, value in () if kept is None else kept.load().items():
            self._keys.put(path, value)
        self._changed = threading.Condition()
        self.arriving = bytearray(1 << 16)
        self._clients: set[_Client] = set()
        # Clients whose handshake is under way, in the order in which they came, and when they are late.
        self._greeting: dict[_Client, asyncio.TimerHandle] = {}
        # A change is told to those whom it concerns, and costs nothing for all others.
        self._subscriptions: Subscriptions[_Client] = Subscriptions()
        # Paths that were given a value since this process asked last what is new in a folder.
        self._news: dict[str, dict[str, None]] = {}
        # Paths that have changed and that clients have not been told of.
        self._untold: list[str] = []
        self._listener = listener
        listener.setblocking(False)
        self._is_over = False
        connections.allow_many()
        # Not made the event loop of the thread that is here, which may have its own.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(self._fail)
        # Done once the server is to end; an error that is not a client's own ends it.
        self._end = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, daemon=True, name="keys")
        self._thread.start()

    def store(self, prefix: str) -> LocalControlStore:
        """Return the keys below *prefix* for this process."""
        return LocalControlStore(self, prefix)

    @property
    def is_serving(self) -> bool:
        """True if clients are answered."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Serve no more: clients see their connection end."""
        self._is_over = True
        self._soon(self._finish)
        self._thread.join()

    def set(self, path: str, value: bytes) -> None:
        """Give *path* a value."""
        with self._changed:
            self._require_served()
            self._put(path, value)
        self._soon(self._tell_changes)

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
        self._soon(self._tell_changes)
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
        self._soon(self._tell_changes)
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

    def _soon(self, act: Callable[[], None]) -> None:
        """Have the serving thread call *act*; it tells changes of its own clients by itself."""
        if threading.current_thread() is not self._thread:
            with suppress(RuntimeError):  # the loop is closed: the thread has ended
                self._loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve())
        except StorageError as error:
            # A client must not be told of a change that the next server would not know.
            self.failure = str(error)
        finally:  # also when memory is short: clients that wait must see that no answer will come
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._listener.close()
            if self._kept is not None:
                self._kept.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept_all())
        done, _ = await asyncio.wait((accepting, self._end), return_when=asyncio.FIRST_COMPLETED)
        # From here on a connection that came is one that `greet` cuts: none may be left open without a server.
        self._loop.remove_reader(self._listener)
        for client in tuple(self._clients):
            client.transport.abort()
        for each in done:
            each.result()

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take in an error in a callback of the loop."""
        if not self._end.done():
            self._end.set_exception(context.get("exception") or RuntimeError(context["message"]))

    async def _accept_all(self) -> None:
        # Not `asyncio.start_server`, which reports each lack of descriptors as often as its backlog is long.
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                name = str(address[0]).removeprefix("::ffff:")
                # Gives others their turn: all nodes may come at a time.
                await self._loop.connect_accepted_socket(
                    partial(_Client, self, name, self._token), connection
                )
            except OSError as error:
                is_full = error.errno in _NO_DESCRIPTORS  # else that client has gone
                if is_full:
                    self.refusals.note("another machine", connections.exhausted())
                await asyncio.sleep(_ACCEPT_AGAIN_S if is_full else 0.0)

    def greet(self, client: _Client) -> None:
        """Have *client*, which has connected, prove that it knows the token; after the end, cut its connection."""
        if self._end.done():
            client.transport.abort()
            return
        if len(self._greeting) >= _MOST_GREETING:
            self._refuse(next(iter(self._greeting)), "too many came at a time")
        self._clients.add(client)
        late = f"it did not say who it is within {_GREETING_S:g} s"
        self._greeting[client] = self._loop.call_later(_GREETING_S, self._refuse, client, late)

    def hear(self, client: _Client, data: bytes) -> None:
        """Carry out the requests that *data* completes; a client that does not read its answers has to wait."""
        try:
            for kind, parts in client.frames.take(self._after_greeting(client, data)):
                self._answer(client, Request(kind), parts)
                if client.is_stuck:
                    break
        except StrangerError as stranger:
            client.transport.write(stranger.answer)
            self._refuse(client, str(stranger))
        except (ValueError, IndexError):  # no client of ours
            self.drop(client)
        self._tell_changes()

    def drop(self, client: _Client) -> None:
        """Cut the connection of *client*, unless it is gone, and forget its waits."""
        self._clients.discard(client)
        if (timer := self._greeting.pop(client, None)) is not None:
            timer.cancel()
        self._subscriptions.leave(client)
        client.transport.abort()

    def _refuse(self, client: _Client, why: str) -> None:
        self.refusals.note(client.address, why)
        self.drop(client)

    def _after_greeting(self, client: _Client, data: bytes) -> bytes:
        """Answer the client's handshake in *data*; return the bytes that follow it."""
        if client.handshake.is_done:
            return data
        answer, rest = client.handshake.take(data)
        if client.handshake.is_done:
            self._greeting.pop(client).cancel()
        client.transport.write(answer)
        return rest

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
        if not self._untold:
            return
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
            self._send(client, b"".join(frames))

    def _send(self, client: _Client, data: bytes) -> None:
        if not client.transport.is_closing():
            client.transport.write(data)
        if client.transport.get_write_buffer_size() > _MOST_WAITING:
            self.drop(client)


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
