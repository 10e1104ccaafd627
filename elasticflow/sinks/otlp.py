"""OpenTelemetry: sends metrics as gauges and events as log records to a collector, by OTLP over HTTP.

The SDK samples metrics by a timer and stamps them when it reads them. Points here have the time of their step even if
they are sent later, so this sink fills and sends the messages of the official `opentelemetry-proto` itself.

A field that has no name in the semantic conventions is called `elasticflow.<field>`. Null fields are left out: the
conventions have no value for "unknown".

Guarantee: if a process is killed before it can record a delivery, the points are sent again with the same names,
attributes and times. A database that keeps one value for each time of a series, as Prometheus does, has them once.
"""

from __future__ import annotations

import gzip
import json
import os
import urllib.error
import urllib.request
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from elasticflow.events import FIELDS
from elasticflow.observe.terminal.event_lines import stack_of
from elasticflow.sinks.sink import Sink, SinkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.events import EventRecord
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

SERVICE = "elasticflow"
"""`service.name`."""
SEVERITY_NUMBERS = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
"""OpenTelemetry's `SeverityNumber` by level."""
SEVERITY_TEXTS = {"debug": "DEBUG", "info": "INFO", "warning": "WARN", "error": "ERROR", "critical": "FATAL"}
"""OpenTelemetry's `SeverityText` by level, in its own short names."""
RESOURCE = ("job", "run_id")
"""Fields that name the run, not the event: attributes of OpenTelemetry's resource, beside `service.name`."""
_PARTS = ("timestamp", "level", "event")
_DEFAULT = "http://localhost:4318"
_TIMEOUT_S = 30.0
_SCOPE = "elasticflow"


class Otlp(Sink):
    """Sends to an OTLP/HTTP receiver."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
        from opentelemetry.proto.common.v1 import common_pb2

        self._metrics: Any = metrics_service_pb2
        self._logs: Any = logs_service_pb2
        self._common: Any = common_pb2

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Remember the address, and the resource that describes the sender."""
        given = self.options.get("endpoint") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT
        self._endpoint = given.rstrip("/")
        self._headers = _headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        self._resource = {
            "service.name": SERVICE,
            otel_name("job"): run.job,
            otel_name("run_id"): run.run_id,
            **{name: value for name, value in run.tags.items() if name.startswith("git.")},
        }

    def points(self, batch: Sequence[Point]) -> None:
        """Send numbers as gauges called `elasticflow.<name>`, and the step beside them; texts as log records."""
        request = self._metrics.ExportMetricsServiceRequest()
        resource = request.resource_metrics.add()
        self._fill(resource.resource.attributes, self._resource)
        scope = resource.scope_metrics.add()
        scope.scope.name = _SCOPE
        gauges: dict[str, Any] = {}
        for point in batch:
            for name, value in {**point.values, "step": float(point.step)}.items():
                if name not in gauges:
                    gauges[name] = scope.metrics.add(name=metric_name(name)).gauge
                number = gauges[name].data_points.add()
                number.time_unix_nano, number.as_double = round(point.time * 1e9), value
                self._fill(number.attributes, {otel_name("generation"): point.generation})
        self._send("metrics", request, self._metrics.ExportMetricsServiceResponse())
        if any(point.texts for point in batch):
            self._send_texts(batch)

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Send log records with the names of OpenTelemetry's conventions (`elasticflow guide events`)."""
        request, records = self._log_request()
        for record in batch:
            event = to_otel(record)
            log = records.add(
                time_unix_nano=event.unix_nanoseconds,
                observed_time_unix_nano=event.unix_nanoseconds,
                severity_number=event.severity_number,
                severity_text=event.severity_text,
                event_name=event.event_name,
            )
            self._fill(log.attributes, event.attributes)
        self._send("logs", request, self._logs.ExportLogsServiceResponse())

    def _send_texts(self, batch: Sequence[Point]) -> None:
        request, records = self._log_request()
        for point in batch:
            for name, text in point.texts.items():
                log = records.add(time_unix_nano=round(point.time * 1e9), event_name="elasticflow.text")
                log.body.string_value = text
                self._fill(log.attributes, {"elasticflow.name": name, otel_name("step"): point.step})
        self._send("logs", request, self._logs.ExportLogsServiceResponse())

    def _log_request(self) -> tuple[Any, Any]:
        request = self._logs.ExportLogsServiceRequest()
        resource = request.resource_logs.add()
        self._fill(resource.resource.attributes, self._resource)
        scope = resource.scope_logs.add()
        scope.scope.name = _SCOPE
        return request, scope.log_records

    def _fill(self, attributes: Any, values: Mapping[str, Any]) -> None:
        attributes.extend(
            self._common.KeyValue(key=key, value=self._value(value)) for key, value in values.items()
        )

    def _value(self, value: Any) -> Any:
        match value:
            case bool():
                return self._common.AnyValue(bool_value=value)
            case int() if abs(value) < 1 << 63:
                return self._common.AnyValue(int_value=value)
            case int() | float():
                return self._common.AnyValue(double_value=float(value))
            case list():
                array = self._common.ArrayValue(values=[self._value(item) for item in value])
                return self._common.AnyValue(array_value=array)
            case _:
                return self._common.AnyValue(string_value=str(value))

    def _send(self, signal: str, message: Any, response: Any) -> None:
        """Send one request and read the answer.

        Raises:
            SinkError: the request was refused, in whole or in part.
            OSError: no answer came.
        """
        request = urllib.request.Request(  # noqa: S310  # the address comes from the job or its environment
            f"{self._endpoint}/v1/{signal}",
            gzip.compress(message.SerializeToString(), compresslevel=1),
            {
                "Content-Type": "application/x-protobuf",
                "Content-Encoding": "gzip",
                "User-Agent": "elasticflow",
                **self._headers,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                response.ParseFromString(answer.read())
        except urllib.error.HTTPError as error:
            raise SinkError(f"{self._endpoint} answers {error.code} {error.reason}") from error
        refused = response.partial_success
        count = refused.rejected_data_points if signal == "metrics" else refused.rejected_log_records
        if count:
            print(f"{self._endpoint} rejects {count} {signal}: {refused.error_message}", flush=True)  # noqa: T201


def metric_name(name: str) -> str:
    """Return the name of a gauge: `elasticflow.eval.accuracy` for `eval/accuracy`."""
    return f"elasticflow.{name.removeprefix('elasticflow/').replace('/', '.')}"


def _headers(text: str) -> dict[str, str]:
    """Return the headers in `OTEL_EXPORTER_OTLP_HEADERS`: `key=value,key=value`, values percent-encoded."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


class OtelRecord(NamedTuple):
    """A line of events.jsonl as a log record of OpenTelemetry.

    Attributes:
        attributes: Fields without a place of their own, under OpenTelemetry's names. Values are texts, numbers, flags or lists of texts.
    """

    unix_nanoseconds: int
    severity_number: int
    severity_text: str
    event_name: str
    attributes: dict[str, Any]


def otel_name(field: str) -> str:
    """Return the name of *field* in OpenTelemetry."""
    known = FIELDS.get(field)
    return (known and known.otel) or f"elasticflow.{field}"


def to_otel(record: Mapping[str, Any]) -> OtelRecord:
    """Return a line of events.jsonl as a log record of OpenTelemetry."""
    level = str(record.get("level", "info"))
    attributes: dict[str, Any] = {}
    for field, value in record.items():
        if field in ("exception", *_PARTS, *RESOURCE) or value is None:
            continue
        attributes[otel_name(field)] = _flat(value)
    if isinstance(exception := record.get("exception"), dict):
        attributes["exception.type"] = exception.get("type", "")
        attributes.setdefault("exception.message", exception.get("message", ""))
        attributes.setdefault("exception.stacktrace", "\n".join(stack_of(exception)))
    return OtelRecord(
        _nanoseconds(str(record["timestamp"])),
        SEVERITY_NUMBERS.get(level, SEVERITY_NUMBERS["info"]),
        SEVERITY_TEXTS.get(level, level.upper()),
        str(record["event"]),
        attributes,
    )


def _flat(value: Any) -> Any:
    """Return *value* in a form that attributes allow; deeper nesting becomes JSON."""
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return list(value)
    return json.dumps(value, default=str) if isinstance(value, list | tuple | dict) else value


def _nanoseconds(timestamp: str) -> int:
    moment = datetime.fromisoformat(timestamp)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
