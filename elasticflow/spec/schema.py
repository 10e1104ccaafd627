"""JSON Schema of the job file, for editors and other tools (floor 1)."""

from __future__ import annotations

from typing import Any

from elasticflow.spec.job import Job

_EXTENDS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ],
    "title": "Extends",
    "description": "Job files this one builds on, relative to it; tables merge, this file wins.",
    "examples": ["base.toml"],
}


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) that accepts what the models accept, table by table.

    What needs several tables or other files (see `spec/checks.py`) is beyond a schema. A file that extends
    others may leave out what they give, so nothing at the root is required once `extends` is there.
    """
    schema = Job.model_json_schema(mode="validation")
    required = schema.pop("required")
    properties = {"extends": _EXTENDS, **_without_null(schema.pop("properties"))}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "elasticflow job file",
        "description": "Declares a training job: model, data, node range, restarts, snapshots.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": required},
        "$defs": _without_null(schema["$defs"]),
    }


def _without_null(node: Any) -> Any:
    """Return the schema without "null", which TOML does not have, and without defaults that are null."""
    if isinstance(node, list):
        return [_without_null(each) for each in node]
    if not isinstance(node, dict):
        return node
    cleaned = {key: _without_null(value) for key, value in node.items() if value is not None}
    choices = [each for each in cleaned.get("anyOf", []) if each != {"type": "null"}]
    if "anyOf" in cleaned:
        del cleaned["anyOf"]
        cleaned |= choices[0] if len(choices) == 1 else {"anyOf": choices}
    return cleaned
