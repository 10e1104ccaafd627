"""Events under the names of OpenTelemetry: its log data model and semantic conventions.

A field that has no name there is called `elasticflow.<field>`. Null fields are left out: the conventions have no value for
"unknown".
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.telemetry.fields import FIELDS, OURS

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE = "elasticflow"
"""`service.name`."""
SEVERITY_NUMBERS = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
"""OpenTelemetry's `SeverityNumber` by level."""
SEVERITY_TEXTS = {"debug": "DEBUG", "info": "INFO", "warning": "WARN", "error": "ERROR", "critical": "FATAL"}
"""OpenTelemetry's `SeverityText` by level, in its own short names."""
RESOURCE = ("job", "run_id")
"""Fields that say who speaks and not what happened: attributes of OpenTelemetry's resource, beside `service.name`."""
_PARTS = ("timestamp", "level", "event")


class OtelRecord(NamedTuple):
    """A line as a log record of OpenTelemetry.

    Attributes:
        unix_nanoseconds: `Timestamp`.
        severity_number: `SeverityNumber`.
        severity_text: `SeverityText`.
        event_name: `EventName`; empty for a log line, which has a body instead.
        body: `Body` of a log line; None for an event.
        attributes: All other fields, under their names there. Values are texts, numbers, flags or lists of texts.
        resource: Attributes of the resource.
    """

    unix_nanoseconds: int
    severity_number: int
    severity_text: str
    event_name: str
    body: str | None
    attributes: dict[str, Any]
    resource: dict[str, Any]


def otel_name(field: str) -> str:
    """Return the name of *field* in OpenTelemetry."""
    known = FIELDS.get(field)
    return (known and known.otel) or f"{OURS}.{field}"


def to_otel(record: Mapping[str, Any], *, is_event: bool = True) -> OtelRecord:
    """Return *record*, a line of events.jsonl, or of a log if *is_event* is false, as a log record of OpenTelemetry."""
    level, name = str(record.get("level", "info")), str(record["event"])
    attributes: dict[str, Any] = {}
    for field, value in record.items():
        if field in ("exception", *_PARTS, *RESOURCE) or value is None:
            continue
        attributes[otel_name(field)] = _flat(value)
    if isinstance(exception := record.get("exception"), dict):
        attributes["exception.type"] = exception.get("type", "")
        attributes.setdefault("exception.message", exception.get("message", ""))
        attributes.setdefault("exception.stacktrace", _stack(exception))
    return OtelRecord(
        _nanoseconds(str(record["timestamp"])),
        SEVERITY_NUMBERS.get(level, SEVERITY_NUMBERS["info"]),
        SEVERITY_TEXTS.get(level, level.upper()),
        name if is_event else "",
        None if is_event else name,
        attributes,
        {"service.name": SERVICE, **{otel_name(f): record[f] for f in RESOURCE if record.get(f) is not None}},
    )


def _stack(exception: Mapping[str, Any]) -> str:
    frames = exception.get("frames") or ()
    lines = (f'  File "{f["path"]}", line {f["line"]}, in {f["function"]}' for f in frames)
    return "\n".join((*lines, f"{exception.get('type')}: {exception.get('message')}"))


def _flat(value: Any) -> Any:
    """Return *value* as attributes may be; what is nested deeper as JSON."""
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return list(value)
    return json.dumps(value, default=str) if isinstance(value, list | tuple | dict) else value


def _nanoseconds(timestamp: str) -> int:
    moment = datetime.fromisoformat(timestamp)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
