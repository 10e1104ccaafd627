"""Facts of a run for sinks, beside its measurements: parameters without secrets, and tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elasticflow.compiler.launch_folder import LaunchRecord, newest_record
from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.errors import RecordError
from elasticflow.sinks.sink import RunFacts
from elasticflow.system.redaction import is_secret, mask_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.run_folder import RunFolder

_LONGEST = 500
# Tables of the job that are no parameters: they concern the environment and reports of a run, not its training.
_LEFT_OUT = frozenset({"env", "torchrun", "logging", "notify"})


def read_facts(folder: RunFolder) -> tuple[Job, RunFacts]:
    """Return the job of the run's newest launch, and the facts of the run.

    Raises:
        RecordError: no record tells the job of the newest launch.
    """
    record, damages = newest_record(folder)
    if record is None:
        why = f": {damages[0]}" if damages else ""
        raise RecordError(f"nothing tells how run {folder.run_id} was launched{why}")
    path = folder.path.absolute()
    facts = RunFacts(
        folder.run_id,
        folder.job,
        path,
        folder.project_root.absolute(),
        dict(parameters_of(job_to_json(record.made.job))),
        _tags(folder, record),
    )
    return record.made.job, facts


def parameters_of(tables: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield each value of a job by its dotted key; values of keys named like secrets are `***`; texts end at 500 characters."""
    for name, table in tables.items():
        if name not in _LEFT_OUT:
            yield from _leaves(name, table)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    match value:
        case None:
            pass
        case dict():
            for name, item in value.items():
                if is_secret(name) and isinstance(item, str | dict | list):
                    yield f"{key}.{name}", "***"
                else:
                    yield from _leaves(f"{key}.{name}", item)
        case bool() | int() | float():
            yield key, value
        case str():
            yield key, mask_url(value)[:_LONGEST]
        case _:
            yield key, mask_url(json.dumps(value))[:_LONGEST]


def _tags(folder: RunFolder, record: LaunchRecord) -> dict[str, str]:
    tags = {"elasticflow.run_id": folder.run_id, "elasticflow.job": folder.job}
    git = record.made.origins.git or {}
    if isinstance(commit := git.get("commit"), str):
        tags["git.commit"] = commit
        if git.get("is_clean") is False:
            tags["git.dirty"] = "true"
    if record.case is not None:
        tags["elasticflow.case"] = record.case
    return tags
