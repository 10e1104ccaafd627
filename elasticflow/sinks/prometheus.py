"""Prometheus: the newest value of each metric, in a file for node_exporter's textfile collector, and at an address.

Guarantee: the file is whole at any moment and holds the newest values. Prometheus sees only the values at a scrape: it
misses values between two scrapes, and past values that a run sends when it catches up.
"""

from __future__ import annotations

import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.history import STATUS_OF_END
from elasticflow.sinks.sink import Sink
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.events import EventRecord
    from elasticflow.observe.run_state import Status
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "elasticflow_"
_WRONG = re.compile(r"[^a-zA-Z0-9_]")
_STATES = ("running", *STATUS_OF_END.values())


class Prometheus(Sink):
    """Keeps the newest values in a file, which is replaced as a whole."""

    look_every_s = 5.0  # scrapes are no more frequent

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._values: dict[str, float] = {}
        self._state: Status = "running"

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin with the values of the process before."""
        self._run = run
        given = self.options.get("textfile")
        self._path = run.project_root / Path(given).expanduser() if given else run.folder / "prometheus.prom"
        self._server = None if (listen := self.options.get("listen")) is None else self._serving(listen)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._values = dict(remembered.get("values", {}))

    def remember(self) -> Remembered:
        """Return the newest values, some of which may not come again, as those of an evaluation."""
        return {"values": dict(self._values)}

    def points(self, batch: Sequence[Point]) -> None:
        """Take over the newest values."""
        for point in batch:
            self._values["step"] = float(point.step)
            self._values["last_point_timestamp_seconds"] = point.time
            self._values.update(
                {
                    _WRONG.sub("_", name.removeprefix("elasticflow/")): value
                    for name, value in point.values.items()
                }
            )
        self._write()

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Take over the run's state."""
        for record in batch:
            name = record.get("event")
            self._state = STATUS_OF_END.get(
                str(name), "running" if name == events.RUN_STARTED else self._state
            )
        self._write()

    def close(self) -> None:
        """Stop serving; the file stays."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serving(self, listen: str) -> ThreadingHTTPServer:
        """Serve the text at /metrics from now on, in separate threads.

        Raises:
            OSError: the address cannot be used.
        """
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_there = self.path.partition("?")[0] == "/metrics"
                data = sink._text().encode() if is_there else b"/metrics\n"
                self.send_response(200 if is_there else 404)
                self.send_header("Content-Type", _CONTENT_TYPE if is_there else "text/plain")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Write nothing about scrapes."""

        host, _, port = listen.rpartition(":")
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        threading.Thread(target=server.serve_forever, daemon=True, name="prometheus").start()
        return server

    def _write(self) -> None:
        # A collector reads the folder all the time and must never see a partial file.
        atomic_files.replace(self._path, [self._text().encode()], mode=0o644, sync=False)

    def _text(self) -> str:
        labels = {"job_name": self._run.job, "run_id": self._run.run_id}
        return exposition(dict(self._values), self._state, labels)


def exposition(values: Mapping[str, float], state: str, labels: Mapping[str, str]) -> str:
    """Return *values* as gauges in Prometheus' text format, and the run's state as one gauge per state."""
    of_run = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for name, value in values.items():
        lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name}{{{of_run}}} {_number(value)}"]
    lines.append(f"# TYPE {PREFIX}run_state gauge")
    lines += [f'{PREFIX}run_state{{{of_run},state="{each}"}} {int(each == state)}' for each in _STATES]
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
