from __future__ import annotations

import json
import math
import ssl
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.sinks import kubeflow
from elasticflow.sinks.kubeflow import Kubeflow
from elasticflow.sinks.sink import Point, SinkError
from tests.sinks.runs import Written, event_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration
CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
)


@contextmanager
def controller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Yield the statuses that an HTTPS server with a certificate of its own takes from whoever has the token of now."""
    certificate, key, token = folder / "ca.crt", folder / "key.pem", folder / "token"
    command = [*CERTIFICATE.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    token.write_text("first\n")
    taken: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {token.read_text().strip()}":
                self.send_error(401)
                return
            taken.append(body["trainerStatus"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(kubeflow.URL, f"https://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv(kubeflow.TOKEN, str(token))
    monkeypatch.setenv(kubeflow.CA, str(certificate))
    try:
        yield taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_progress_and_measures_are_posted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 20 steps at 2 s each leave 20 s; what comes before the pause is over waits for the end; a new token is read."""
    monkeypatch.setattr(kubeflow, "EVERY_S", math.inf)
    with controller(tmp_path, monkeypatch) as taken:
        sink = Kubeflow({})
        sink.open(Written.under(tmp_path).facts, {})
        sink.events([event_line(events.TRAINING_STARTED, step=0, steps=20)])
        sink.points([Point(step, 2.0 * step, values={"loss": 1 / step}) for step in range(1, 11)])
        sink.points([Point(11, 22.0, values={"loss": 0.5, "eval/accuracy": 0.25, "gap": float("nan")})])
        (tmp_path / "token").write_text("renewed\n")
        remembered = sink.remember()
        sink.events([event_line(events.RUN_FINISHED, step=20)])
        sink.close()

    first, last = taken
    assert (50, 20) == (first["progressPercentage"], first["estimatedRemainingSeconds"])
    assert [{"name": "loss", "value": "0.1"}] == first["metrics"]
    assert (100, 0) == (last["progressPercentage"], last["estimatedRemainingSeconds"])
    assert [{"name": "loss", "value": "0.5"}, {"name": "eval/accuracy", "value": "0.25"}] == last["metrics"]
    assert (20, 11) == (remembered["steps"], remembered["step"])


def test_a_server_with_another_certificate_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to whom the controller's certificate does not vouch for."""
    with controller(tmp_path, monkeypatch) as taken:
        monkeypatch.delenv(kubeflow.CA)
        sink = Kubeflow({})
        sink.open(Written.under(tmp_path).facts, {})
        with pytest.raises(OSError, match="certificate verify failed"):
            sink.points([Point(1, 1.0, values={"loss": 0.5})])

    assert [] == taken


def test_outside_of_a_trainjob_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the controller sets are named."""
    monkeypatch.delenv(kubeflow.URL, raising=False)
    with pytest.raises(SinkError, match="KUBEFLOW_TRAINER_SERVER_URL and"):
        Kubeflow({}).open(Written.under(tmp_path).facts, {})
