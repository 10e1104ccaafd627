"""An OTLP/HTTP receiver on loopback, built on the official messages of `opentelemetry-proto`."""

from __future__ import annotations

import gzip
import importlib
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MESSAGES = "opentelemetry.proto.collector.{0}.v1.{0}_service_pb2"


@dataclass
class Received:
    """What has arrived.

    Attributes:
        endpoint: Where to send.
        points: By metric: time in nanoseconds and value of each data point, in order of arrival.
        events: Name and attributes of each log record.
        headers: Of the last request.
        resource: Attributes of the last request's resource.
        refuses: HTTP status with which requests are answered; None: they are taken.
    """

    endpoint: str = ""
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)
    refuses: int | None = None


@contextmanager
def otlp_receiver() -> Iterator[Received]:
    """Yield what a receiver takes in, which answers until the end."""
    metrics, logs = (importlib.import_module(_MESSAGES.format(signal)) for signal in ("metrics", "logs"))
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
            if received.refuses is not None:
                self.send_error(received.refuses)
                return
            received.headers = dict(self.headers)
            if self.path == "/v1/metrics":
                _take_metrics(received, metrics.ExportMetricsServiceRequest.FromString(data))
                answer = metrics.ExportMetricsServiceResponse()
            else:
                assert self.path == "/v1/logs"
                _take_logs(received, logs.ExportLogsServiceRequest.FromString(data))
                answer = logs.ExportLogsServiceResponse()
            body = answer.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    received.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


def _take_metrics(received: Received, request: Any) -> None:
    for resource in request.resource_metrics:
        received.resource = _attributes(resource.resource.attributes)
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            points = [(point.time_unix_nano, point.as_double) for point in metric.gauge.data_points]
            received.points.setdefault(metric.name, []).extend(points)


def _take_logs(received: Received, request: Any) -> None:
    for resource in request.resource_logs:
        received.resource = _attributes(resource.resource.attributes)
        for log in (log for scope in resource.scope_logs for log in scope.log_records):
            received.events.append((log.event_name, _attributes(log.attributes)))
