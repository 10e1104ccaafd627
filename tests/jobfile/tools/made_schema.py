"""Makes the JSON Schema of the job file, which the package carries as a file: printing it builds no model."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from elasticflow.jobfile.tables.evaluation import SET_NAME
from elasticflow.jobfile.tables.job import NEEDED_TO_TRAIN, OF_TRAINING, Job
from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE
from elasticflow.jobfile.tables.types import ONE_OF

_Schema = dict[str, Any]

_EXTENDS = {
    "description": "Job files that this file builds on, relative to it: tables merge, this file wins. Keys that "
    "they give may be left out here.",
    "examples": ["base.toml", ["base.toml", "large.toml"]],
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ],
}
# JSON Schema needs this nowhere; tombi takes a table as closed unless told otherwise.
_OPEN = {"additionalProperties": True}

# Inner tables, which a file has as a whole or not at all.
_PARTS = frozenset({"MetricTable"})
_OF_SET = "One of several evaluation sets: metrics over its data, every sample once."

BEYOND = (
    "nodes.min <= nodes.max: one value against another",
    "evaluation.best names a key of evaluation.metrics: one value against another's keys",
    "a group of parameters has match, ndim or module, and none is empty: any of several keys",
    "`every` of a hook is on_step's: one table's key by the name of the table",
    "`entry` of a hook's or a collate's table: a file may leave it to the file that it extends",
    "5.0 where a whole number is asked for: one number to JSON, two types to TOML; tombi tells them apart, taplo not",
    "keys of a volume, or of a toleration, that exclude each other, and variables of kubernetes.env that are secret",
    "[notify] has url or command, which a file may leave to the file that it extends, and no secret in its url",
    "variables that env cannot set: a list of names, told with what to write instead",
    "nan and inf: no numbers to JSON; what an editor says of them is its own",
)
"""Mistakes that the models refuse and no JSON Schema can express; `jobfile/checks/` has those of several tables or files."""


class _Sorted(GenerateJsonSchema):
    """Sorts names as pydantic does, but not those inside an example."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return {
            name: self._ordered(value[name], name)
            for name in (value if parent_key == "properties" else sorted(value))
        }

    def _ordered(self, value: Any, key: str) -> Any:
        if key in {"default", "examples"}:
            return value
        if isinstance(value, list):
            return [self._ordered(one, "") for one in value]
        return self.sort(value, key) if isinstance(value, dict) else value


def job_schema() -> _Schema:
    """Return the JSON Schema (2020-12) that accepts what the models accept, except for what is `BEYOND` it.

    A file may leave out keys that its cases or the files it extends give: with a matrix or `extends`, no key is required.
    """
    schema = _tidied(Job.model_json_schema(schema_generator=_Sorted, mode="validation"))
    needed: _Schema = {}
    for name, table in schema["$defs"].items():
        needed[name] = {} if name in _PARTS else _requirements(name, table)
    needed["EvaluationTable"] = _several_sets(schema["$defs"], needed["EvaluationTable"])
    tables = {
        name: {"description": schema["$defs"][_name_of(ref)]["description"], **ref}
        for name, ref in schema["properties"].items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:elasticflow:job-file",
        "x-tombi-toml-version": "v1.1.0",  # as tomli reads it
        "title": "elasticflow job file",
        "description": "Declares a training job: model, data, node range, restarts, snapshots.",
        "type": "object",
        "properties": {"extends": _EXTENDS, **tables},
        "additionalProperties": False,
        # A file may leave out keys that other files or the cases of a matrix give.
        "if": {"anyOf": [{"required": [each], **_OPEN} for each in ("extends", "matrix")], **_OPEN},
        "else": {
            "properties": {name: wanted for name, ref in tables.items() if (wanted := needed[_name_of(ref)])},
            "required": ["job"],
            **_OPEN,
            "if": {"required": ["script"], **_OPEN},
            "then": {"properties": dict.fromkeys(OF_TRAINING, False), **_OPEN},
            "else": {"required": ["job", *NEEDED_TO_TRAIN], **_OPEN},
        },
        "$defs": schema["$defs"],
    }


def schema_text() -> str:
    """Return the text that `SCHEMA_FILE` must hold."""
    return json.dumps(job_schema(), indent=2) + "\n"


def _name_of(ref: _Schema) -> str:
    return str(ref["$ref"]).rpartition("/")[2]


def _requirements(name: str, table: _Schema) -> _Schema:
    """Remove from a table the requirements that only a whole job must meet, and return them."""
    wanted: _Schema = {}
    if required := table.pop("required", []):
        wanted["required"] = required
    pair = ONE_OF.get(name.removesuffix("Table").lower())
    if pair is not None:  # never both keys; exactly one unless the file extends others
        first, second = pair
        # Not `dependentSchemas`, which taplo does not know, nor `not`, which points at the whole table.
        table["if"] = {"required": [first], **_OPEN}
        table["then"] = {"properties": {second: False}, **_OPEN}
        wanted["anyOf"] = [{"required": [each], **_OPEN} for each in (first, second)]
    return wanted and wanted | _OPEN


def _several_sets(tables: _Schema, needed: _Schema) -> _Schema:
    """Let [evaluation] be a table of sets as well; return its requirements for a whole job.

    *needed*: the requirements for one set.
    """
    one = tables["EvaluationTable"]
    tables["EvaluationSet"] = {**one, "description": _OF_SET}
    has_keys = {"anyOf": [{"required": [key], **_OPEN} for key in one["properties"]], **_OPEN}
    tables["EvaluationTable"] = {
        **one,
        "propertyNames": {"pattern": SET_NAME},
        "additionalProperties": {"$ref": "#/$defs/EvaluationSet"},
        "if": has_keys,
        "then": {"properties": dict.fromkeys(one["properties"], True), "additionalProperties": False},
    }
    return {"if": has_keys, "then": needed, "else": {"minProperties": 1, "additionalProperties": needed}}


def _tidied(schema: _Schema) -> _Schema:
    """Return the models' schema as a job file needs it, each key with its examples."""
    tidied: _Schema = _cleaned(schema)
    tidied["properties"]["evaluation"] = {
        "$ref": "#/$defs/EvaluationTable"
    }  # of several sets, see `_several_sets`
    for table in tidied["$defs"].values():
        for key in table["properties"].values():
            if "$ref" in key:  # a hover text of its own, for editors that do not follow a $ref
                key.setdefault("description", tidied["$defs"][_name_of(key)]["description"])
    mix = tidied["$defs"]["DatasetTable"]["properties"]["mix"]
    mix["minItems"] = 1  # an empty array means the same as no key
    del mix["default"]
    return tidied


def _cleaned(node: Any) -> Any:
    """Return the schema without "null", which TOML lacks, without titles, and with closed tables of names."""
    if isinstance(node, list):
        return [_cleaned(each) for each in node]
    if not isinstance(node, dict):
        return node
    cleaned = {
        key: _cleaned(value)
        for key, value in node.items()
        if value is not None and not (key == "title" and isinstance(value, str))
    }
    choices = [each for each in cleaned.get("anyOf", []) if each != {"type": "null"}]
    if "anyOf" in cleaned:
        del cleaned["anyOf"]
        cleaned = {**choices[0], **cleaned} if len(choices) == 1 else {**cleaned, "anyOf": choices}
    if "patternProperties" in cleaned:
        cleaned["additionalProperties"] = False
    return cleaned


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), "utf-8")
