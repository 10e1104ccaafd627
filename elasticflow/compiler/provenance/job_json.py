"""The resolved job as JSON and back, and its digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.tables.evaluation import set_tables
from elasticflow.jobfile.tables.job import OF_TRAINING, Job
from elasticflow.jobfile.tables.logging import SINKS
from elasticflow.jobfile.type_checks.annotations import DatasetValue
from elasticflow.protocol.snapshot_settings import AUTO
from elasticflow.system.redaction import without_secrets

# Keys that are newer than some records, with their defaults, nested ones too. A job that leaves them out keeps its digest:
# list a new key of an existing table here, or every older job has another digest.
_LATER: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("optimizer", "groups"), []),
    (("train", "time_limit"), None),
    (("model", "flops_per_sample"), None),
    (("logging", "count_name"), None),
    (("logging", "grad_norm"), None),
    (("logging", "peak_flops"), None),
    (("dataset", "sampler"), None),
    (("train", "gradient_checkpointing"), False),
    (("train", "stop_when"), None),
    (("lr_scheduler", "metric"), None),
    (("dataset", "mix"), []),
    *((("logging", name), None) for name in SINKS),
    (("logging", "custom"), {}),
    (("nodes", "token_file"), None),
    (("nodes", "device"), "auto"),
    (("train", "tf32"), None),
    (("train", "channels_last"), False),
    (("parallel", "init"), "cpu"),
    (("parallel", "offload"), None),
)
_OF_DATA = "$dataset"  # a value of the training data: {"$dataset": "vocab_size"}
_FLOAT = "$float"  # JSON has no infinity and no NaN: {"$float": "inf"}


def job_to_json(job: Job) -> dict[str, Any]:
    """Return the job as JSON values, every default written out, without secrets of `snapshots` and `env`.

    Raises:
        JobRefusedError: JSON and Python literals cannot express a value (TOML dates and times).
    """
    tables = public_tables(job)
    return {name: to_json(table, f"[{name}]") for name, table in tables.items()}


def public_tables(job: Job) -> dict[str, Any]:
    """Return the job's tables without secrets of `snapshots` and `env`, which belong in no record or comparison."""
    tables = job.as_tables()
    for name in ("script",) if job.script is None else OF_TRAINING:
        del tables[name]
    for path, default in _LATER:
        _leave_out(tables, path, default)
    for name in ("hooks", "notify", "parallel", "slurm", "kubernetes", "ray"):
        if name in tables and tables[name] is None:
            del tables[name]
    if job.env is None:
        del tables["env"]
    else:
        secrets = job.env.secrets()
        tables["env"] = {name: value for name, value in job.env.values().items() if name not in secrets}
    for place, _ in set_tables(tables):
        table = tables["evaluation"][place[1]] if len(place) > 1 else tables["evaluation"]
        for key in ("samples", "collate", "step"):
            if table[key] is None:
                del table[key]
    snapshots = without_secrets(tables["snapshots"])
    # As in the records of jobs that left the key out before it had this default.
    return {
        **tables,
        "snapshots": {**snapshots, "memory": None if snapshots["memory"] == AUTO else snapshots["memory"]},
    }


def _leave_out(tables: dict[str, Any], path: tuple[str, ...], default: object) -> None:
    """Remove the key at *path* if it has its default; do nothing if a table on the way is absent."""
    *above, key = path
    table: Any = tables
    for name in above:
        table = table.get(name)
        if table is None:
            return
    if table[key] == default:
        del table[key]


def job_from_json(values: Mapping[str, Any]) -> Job:
    """Return the job that `job_to_json` described."""
    tables = from_json(values)
    # Records hold no secrets: a variable in a record was declared to be none, whatever its name.
    if (env := tables.get("env")) is not None:
        tables["env"] = {name: {"value": value, "secret": False} for name, value in env.items()}
    snapshots = tables.get("snapshots")
    if snapshots is not None and snapshots.get("memory") is None:
        tables["snapshots"] = {key: value for key, value in snapshots.items() if key != "memory"}
    return Job.model_validate(tables)


def job_digest(job: Job) -> str:
    """Return the SHA-256 over the job's canonical JSON: the same for equal jobs, however they were written."""
    text = json.dumps(job_to_json(job), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(value: Any, where: str = "") -> Any:
    """Return *value* in JSON's types: tuples as lists, infinities and NaN marked.

    Raises:
        JobRefusedError: JSON cannot express the value; *where* names it.
    """
    match value:
        case float() if not math.isfinite(value):
            return {_FLOAT: str(value)}
        case None | bool() | int() | float() | str():
            return value
        case DatasetValue():
            return {_OF_DATA: value.name}
        case Mapping():
            dot = " " if where.endswith("]") else "."
            return {key: to_json(item, f"{where}{dot}{key}") for key, item in value.items()}
        case list() | tuple():
            return [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
        case _:
            raise JobRefusedError(
                f"{where}: a {type(value).__name__} cannot be an argument",
                "write it as a string and let the factory parse it",
            )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` converted, with lists for tuples."""
    if isinstance(value, Mapping):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        if value.keys() == {_OF_DATA} and isinstance(value[_OF_DATA], str):
            return DatasetValue(value[_OF_DATA])
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value
