"""JSON Schema (2020-12) of the lines that a run writes: events.jsonl, metrics.jsonl, logs/ and logged/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.events import FIELDS, SCHEMA_VERSION
from elasticflow.protocol.worker_environment import DeviceUsage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.events import Event

Schema = dict[str, Any]

_NUMBER: Schema = {"type": "number"}
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_NUMBERS: Schema = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_FRAME: Schema = {
    "type": "object",
    "properties": {
        "path": _TEXT,
        "line": {"type": ["integer", "null"]},
        "function": _TEXT,
        "code": {"type": ["string", "null"]},
        "is_own": {"type": "boolean"},
    },
    "required": ["path", "line", "function", "code", "is_own"],
    "additionalProperties": False,
}
TYPES: dict[str, Schema] = {
    "any": {},
    "text": _TEXT,
    "texts": {"type": "array", "items": _TEXT},
    "time": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"},
    "level": {"enum": ["debug", "info", "warning", "error", "critical"]},
    "flag": {"type": "boolean"},
    "number": _NUMBER,
    "integer": {"type": "integer"},
    "whole": _WHOLE,
    "wholes": {"type": "array", "items": _WHOLE},
    "numbers": _NUMBERS,
    "durations": {"type": "object", "additionalProperties": _NUMBER},
    "measured": {"type": "object"},
    "facts": {"type": "object"},
    "list": {"type": "array"},
    "exception": {
        "type": "object",
        "properties": {
            "type": _TEXT,
            "message": _TEXT,
            "frames": {"type": "array", "items": _FRAME},
            "causes": {"type": "array", "items": _TEXT},
        },
        "required": ["type", "message", "frames"],
        "additionalProperties": False,
    },
    "text or facts": {"type": ["string", "object"]},
    "count or facts": {"type": ["integer", "object"]},
    "number or text": {"type": ["number", "string"]},
    "number or numbers": {"anyOf": [_NUMBER, _NUMBERS]},
}
"""What the types of fields are; a `?` after one also allows null."""

# Only lines of workers have these, and always together.
_OF_WORKERS = ("origin", *events.WORKER_FIELDS)
# metrics.jsonl leaves out fields that are the same on each of its lines.
_OF_METRICS = ("generation", "world_size", "step")
_OF_STEPS = ("count", "grad_norm", "mfu", *DeviceUsage._fields)
_POINT_KINDS = {"scalar": {"type": ["number", "null"]}, "text": _TEXT, "image": _TEXT}


def schema_of_type(name: str) -> Schema:
    """Return the schema of the type called *name* in `Field.type`."""
    schema = TYPES[name.removesuffix("?")]
    if not name.endswith("?") or not schema:
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def schema_of_event(event: Event) -> Schema:
    """Return the schema of one line of *event* in events.jsonl, or in a rank's log."""
    own = event.fields
    names = [*events.COMMON_FIELDS, *(f for f in own if f not in events.COMMON_FIELDS)]
    required = [name for name in names if name not in event.optional]
    schema: Schema = {"description": event.meaning, "type": "object"}
    if event.emitter == "worker":
        names += [name for name in _OF_WORKERS if name not in names]
        if event.may_be_supervisors:
            schema["dependentRequired"] = {"origin": list(events.WORKER_FIELDS)}
        else:
            required += [name for name in _OF_WORKERS if name not in required]
    properties = _properties(names)
    properties["event"] = {"const": str(event)}
    properties["level"] = {"const": event.level}
    return {**schema, "properties": properties, "required": required, "additionalProperties": False}


def schema_of_metrics() -> tuple[Schema, Schema]:
    """Return the schemas of a step's line in metrics.jsonl, and of an evaluation's."""
    step = [*_OF_METRICS, *events.STEP.fields]
    evaluation = [*_OF_METRICS, *events.EVALUATION.fields]
    of_steps = {
        "description": events.STEP.meaning,
        "type": "object",
        "properties": _properties([*step, *_OF_STEPS]),
        "required": step,
        # `tokens_per_s` and the like, and values that the job's own step returned.
        "additionalProperties": {"type": ["number", "null"]},
    }
    of_evaluations = {
        "description": events.EVALUATION.meaning,
        "type": "object",
        "properties": _properties(evaluation),
        "required": [name for name in evaluation if name not in events.EVALUATION.optional],
        "additionalProperties": False,
    }
    return of_steps, of_evaluations


def schema_of_log_line() -> Schema:
    """Return the schema of a line of logs/g<generation>/rank<rank>.jsonl that is no event.

    The job's own code and libraries may give it more fields.
    """
    names = [*events.COMMON_FIELDS, *_OF_WORKERS, "logger", "process", "exception"]
    return {
        "description": "a record of the job's code, a library or a warning, or a note of elasticflow that is no event",
        "type": "object",
        "properties": _properties(names),
        "required": ["timestamp", "level", "event", "rank"],
    }


def schema_of_point() -> Schema:
    """Return the schema of a line that a hook logged, in logged/g<generation>-rank<rank>.jsonl."""
    first = {"type": "object", "properties": {"from": _WHOLE}, "required": ["from"]}
    properties = {
        "step": _WHOLE,
        "epoch": _WHOLE,
        "hook": _TEXT,
        "name": _TEXT,
        "time": _NUMBER,
        "kind": {"enum": list(_POINT_KINDS)},
        "value": {},
    }
    by_kind = [
        {"properties": {"kind": {"const": kind}, "value": value}} for kind, value in _POINT_KINDS.items()
    ]
    point = {"type": "object", "properties": properties, "required": list(properties), "anyOf": by_kind}
    description = (
        "what a hook logged after a step; a file's first line says after which step its generation began"
    )
    return {"description": description, "anyOf": [first, point]}


def events_schema() -> Schema:
    """Return the schema of a line of events.jsonl, which is one of the events; other lines are under `$defs`."""
    of_steps, of_evaluations = schema_of_metrics()
    kept = [event for event in events.EVENTS.values() if event.is_kept]
    of_events = {str(event): schema_of_event(event) for event in events.EVENTS.values()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:elasticflow:events:{SCHEMA_VERSION}",
        "title": "a line of events.jsonl of a run of elasticflow",
        "type": "object",
        "properties": {"event": {"enum": [str(event) for event in kept]}},
        "required": list(events.COMMON_FIELDS),
        "allOf": [
            {
                "if": {"properties": {"event": {"const": str(event)}}},
                "then": {"$ref": f"#/$defs/{event}"},
            }
            for event in kept
        ],
        "$defs": {
            **of_events,
            "metrics.step": of_steps,
            "metrics.evaluation": of_evaluations,
            "logs.line": schema_of_log_line(),
            "logged.point": schema_of_point(),
            **{
                f"field.{name}": {"description": field.meaning, **schema_of_type(field.type)}
                for name, field in FIELDS.items()
            },
        },
    }


def _properties(names: Iterable[str]) -> Schema:
    return {name: {"$ref": f"#/$defs/field.{name}"} for name in names}
