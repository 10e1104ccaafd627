"""The origins of a launch, as recorded in job.json in its folder and in JOB.json beside the snapshots."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder.materialize import read_plan
from elasticflow.compiler.provenance.origins import JOB_FILE, JOB_JSON, Made, made_from, with_environment
from elasticflow.errors import ElasticflowError, LaunchFolderError, RecordError
from elasticflow.run_folder import snapshot_place
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import records
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elasticflow.run_folder import RunFolder


@dataclass(frozen=True)
class LaunchRecord:
    """A launch as it was recorded.

    Attributes:
        place: Path for messages.
        files: The job file and the files it extends, relative to the project root; None if not recorded.
        overrides: `--set` values that the job was resolved with.
        case: Name of the job's case in the job file's [matrix].
    """

    place: str
    made: Made
    files: tuple[str, ...] | None
    overrides: tuple[str, ...]
    case: str | None


def record_in(folder: Path) -> LaunchRecord | Damage | None:
    """Return the content of job.json of the launch in *folder*, with the report of its workers.

    Returns the damage if the file cannot be used; None if it is absent.
    """
    path = folder / JOB_JSON
    content = records.read(path)
    record = record_from(content, str(path)) if isinstance(content, dict) else content
    if isinstance(record, LaunchRecord):
        return replace(record, made=with_environment(record.made, folder))
    return record


def made_in(folder: Path) -> Made:
    """Return the job and origins of the launch in *folder*, with its workers' report.

    Raises:
        LaunchFolderError: there is no job.json that this version can read.
    """
    record = record_in(folder)
    if isinstance(record, LaunchRecord):
        return record.made
    raise LaunchFolderError(f"{folder / JOB_JSON} is absent" if record is None else str(record))


def newest_record(folder: RunFolder) -> tuple[LaunchRecord | None, list[Damage]]:
    """Return the newest launch on this machine whose record is whole, and the damage of newer records."""
    damages: list[Damage] = []
    for number in reversed(folder.launch_numbers()):
        record = record_in(folder.launch(number))
        if isinstance(record, LaunchRecord):
            return record, damages
        damages.append(record or Damage(str(folder.launch(number) / JOB_JSON), "is absent"))
    return None, damages


def last_record(folder: RunFolder, project_root: Path, warn: Callable[[str], None]) -> LaunchRecord:
    """Return the record of the run's last launch, as far as this machine's files tell; warn of damaged records.

    Raises:
        RecordError: there is no usable record.
    """
    newest = folder.launch(folder.launch_numbers()[-1])
    record = record_in(newest)
    if isinstance(record, LaunchRecord):
        return record
    damage = record or Damage(str(newest / JOB_JSON), "is absent")
    instead = _record_beside(folder, project_root, newest) or newest_record(folder)[0]
    if instead is None:
        raise RecordError(
            f"nothing tells how run {folder.run_id} was launched: {damage}",
            f"give its job file: elasticflow run JOB.toml --run-id {folder.run_id}",
        )
    warn(f"{damage}; {instead.place} is used instead")
    return instead


def _record_beside(folder: RunFolder, project_root: Path, launch: Path) -> LaunchRecord | None:
    """Return the record in JOB.json, at the snapshots' place that plan.json of *launch* names; None if unusable."""
    try:
        snapshots = read_plan(launch).snapshots
        uri, prefix = snapshot_place(snapshots.uri, folder, project_root)
        catalog = Catalog(Storage(uri, snapshots.options), prefix)
    except ElasticflowError:  # without the plan: the default place of snapshots
        catalog = Catalog(Storage(str(folder.path)))
    with suppress(OSError, ElasticflowError):
        content = catalog.inspect_job_record()
        if isinstance(content, dict):
            record = record_from(content, f"{catalog.storage.uri}/JOB.json")
            return record if isinstance(record, LaunchRecord) else None
    return None


def record_from(content: Mapping[str, Any], place: str) -> LaunchRecord | Damage:
    """Return the record in the content of job.json or JOB.json, or its damage."""
    try:
        made = made_from(content)
        files = content.get("files")
        if files is None:  # JOB.json of earlier versions has no files
            own = [name for name, each in made.origins.sources.items() if JOB_FILE in each.roles]
            files = own if len(own) == 1 else None  # of several files, any may be the job's own
        return LaunchRecord(
            place,
            made,
            None if files is None else _texts(files, "files"),
            _texts(content.get("overrides") or [], "overrides"),
            _text_or_none(content.get("case"), "case"),
        )
    except ElasticflowError as error:
        return Damage(place, f"is not what this version writes: {error.message}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a ValidationError is a ValueError
        text = str(error).strip().splitlines() or [""]
        return Damage(place, f"is not what this version writes: {type(error).__name__}: {text[0]}")


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{what} is no list of texts")
    return tuple(value)


def _text_or_none(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} is no text")
    return value
