"""A proxy before a store's server that answers wrongly, drops connections or is slow, by a schedule and not by chance."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A status: answered without asking the server. reset: dropped unread by the server. lost: done, but dropped before the
# answer. cut: dropped in the middle of the answer. flip: one bit of the answer is another.
Fault = int | Literal["reset", "lost", "cut", "flip"] | None
_CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied"}
_PIECE = 64 << 10
_OWN = {"connection", "transfer-encoding", "date", "server"}


class FaultyProxy:
    """A running proxy.

    Attributes:
        url: Its address.
        schedule: (number of the request from 0, method) -> what happens to it; may be changed at any time.
        bytes_per_s: How fast bodies pass, all connections together; None: as fast as they can.
        asked: Method and path of each request so far.
        flows: While it is cleared, no body passes.
    """

    def __init__(self, upstream: str) -> None:
        self.schedule: Callable[[int, str], Fault] = lambda _number, _method: None
        self.bytes_per_s: float | None = None
        self.asked: list[tuple[str, str]] = []
        self.flows = threading.Event()
        self.flows.set()
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self._free_at = 0.0
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # dropped connections are the point
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Serve."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def fault_for(self, method: str, path: str) -> Fault:
        """Count a request and return what is to happen to it."""
        with self._lock:
            self.asked.append((method, path))
            return self.schedule(len(self.asked) - 1, method)

    def pace(self, size: int) -> None:
        """Return when *size* more bytes may have passed."""
        self.flows.wait()
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_s
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))

    def forward(
        self, handler: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the server and return status, headers and body of its answer."""
        assert self._upstream.hostname is not None
        connection = http.client.HTTPConnection(self._upstream.hostname, self._upstream.port, timeout=60)
        try:
            headers = {name: value for name, value in handler.headers.items() if name.lower() != "expect"}
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def handle_any(self) -> None:
        """Do to one request what the schedule says."""
        body = self._body()
        fault = self.owner.fault_for(self.command, self.path)
        if fault == "reset":
            self._drop()
        elif isinstance(fault, int):
            text = f"<Error><Code>{_CODES[fault]}</Code><Message>by the proxy</Message></Error>"
            self._answer(fault, [("Content-Type", "application/xml")], text.encode())
        else:
            status, headers, content = self.owner.forward(self, body)
            if fault == "lost":
                self._drop()
            else:
                if fault == "flip" and content:
                    content = content[:-1] + bytes([content[-1] ^ 1])
                self._answer(status, headers, content, is_cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815  # http.server's names

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        left, pieces = int(self.headers.get("Content-Length") or 0), []
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            self.owner.pace(len(piece))
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in _OWN:
                self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = body if self.command != "HEAD" else b""
        for start in range(0, len(sent), _PIECE):
            piece = sent[start : start + _PIECE]
            self.owner.pace(len(piece))
            if is_cut:
                self.wfile.write(piece[: len(piece) // 2])
                break
            self.wfile.write(piece)
        if is_cut:
            self._drop()

    def _drop(self) -> None:
        """Reset the connection: no orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """Give a port on loopback where connections are accepted and never answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])
