"""Events under the names of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from elasticflow.events import FIELDS
from elasticflow.sinks.otlp import SEVERITY_NUMBERS, otel_name, to_otel

FAILED: dict[str, Any] = {
    "timestamp": "2026-11-23T03:00:00.250001Z",
    "level": "error",
    "event": "worker.failed",
    "job": "mnist",
    "run_id": "a1",
    "generation": 2,
    "rank": 1,
    "node": "n0",
    "pid": 77,
    "exit_code": -9,
    "class": "crash",
    "error": "killed by SIGKILL",
    "traceback": None,
    "others": None,
    "stderr": ["a", "b"],
}


def test_an_event_as_a_log_record_of_opentelemetry() -> None:
    """Name and severity are parts of the record, the run is the resource's, the rest attributes; null is left out."""
    record = to_otel(FAILED)

    assert record.event_name == "worker.failed"
    assert record.unix_nanoseconds == 1795402800250001000
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert record.attributes == {
        "elasticflow.generation": 2,
        "elasticflow.rank": 1,
        "elasticflow.node": "n0",
        "process.pid": 77,
        "process.exit.code": -9,
        "error.type": "crash",
        "exception.message": "killed by SIGKILL",
        "elasticflow.stderr": ["a", "b"],
    }


def test_an_exception_has_its_stack() -> None:
    """Its type, its message, and its frames as a traceback."""
    frame = {"path": "a.py", "line": 3, "function": "step", "code": "x", "is_own": True}
    line = {
        "timestamp": "2026-11-23T03:00:00Z",
        "level": "warning",
        "event": "worker.raised",
        "exception": {"type": "OSError", "message": "no space", "frames": [frame]},
    }
    record = to_otel(line)

    assert record.attributes["exception.type"] == "OSError"
    assert record.attributes["exception.stacktrace"].splitlines() == [
        '  File "a.py", line 3, in step',
        "    x",
        "OSError: no space",
    ]


def test_nested_values_are_json() -> None:
    """Attributes are flat."""
    durations = {**FAILED, "event": "run.finished", "durations": {"training": 1.5}}
    assert to_otel(durations).attributes["elasticflow.durations"] == '{"training": 1.5}'


def test_no_two_fields_of_an_event_have_one_name_elsewhere() -> None:
    """Else one would hide the other."""
    from elasticflow import events

    for event in events.EVENTS.values():
        fields = {*events.COMMON_FIELDS, *events.WORKER_FIELDS, *event.fields}
        assert len({otel_name(field) for field in fields}) == len(fields), event


def test_every_level_has_a_severity() -> None:
    """The levels that lines have."""
    assert FIELDS["level"].type == "level"
    assert SEVERITY_NUMBERS["info"] == 9
