"""A webhook on loopback that answers as it is told to."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "T0AAAAAAA/B0BBBBBBB/s3cr3tXYZs3cr3tXYZ24"


@dataclass
class Webhook:
    """What has arrived, and how requests are answered.

    Attributes:
        url: The address, with a secret in it.
        answers: Statuses of the next requests; 0: no answer at all. After the last one: 200.
        retry_after: What goes with 429.
        bodies: Of requests that were answered with 200.
        asked: How many requests there were.
    """

    url: str = ""
    answers: list[int] = field(default_factory=list)
    retry_after: str = "0"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0


@contextmanager
def webhook(*answers: int) -> Iterator[Webhook]:
    """Yield a webhook that answers until the end."""
    received, is_over = Webhook(answers=list(answers)), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.asked += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = received.answers.pop(0) if received.answers else 200
            if status == 0:
                is_over.wait()
                return
            if status == 200:
                received.bodies.append(body)
            said = f"Cannot POST {self.path}".encode()
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", received.retry_after)
            if status == 302:
                self.send_header("Location", "/login")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}/services/{SECRET}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
