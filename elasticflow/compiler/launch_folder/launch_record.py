"""What a launch was made from, as job.json in its folder and JOB.json beside the snapshots tell it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.factory_calls import call_forms
from elasticflow.compiler.entry_point.render import render
from elasticflow.compiler.launch_folder.materialize import read_plan
from elasticflow.compiler.provenance.origins import JOB_JSON, Made, made_from, with_environment
from elasticflow.compiler.provenance.sources import JOB_FILE
from elasticflow.errors import ElasticflowError, RecordError
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
        made: The job, and what the launch was made from.
        files: The job file and what it extends, from the project root; None if that is not told.
        overrides: `--set` values the job was resolved with.
        case: The case of the job file's [matrix] that the job is.
        root: The project root, from the launch folder; None if that is not told.
        digest: Of the job.
    """

    place: str
    made: Made
    files: tuple[str, ...] | None
    overrides: tuple[str, ...]
    case: str | None
    root: str | None
    digest: str


def record_in(folder: Path) -> LaunchRecord | Damage | None:
    """Return what job.json of the launch in *folder* tells, with what its workers reported.

    What is wrong with it, if it cannot be used; None if it is absent.
    """
    path = folder / JOB_JSON
    content = records.read(path)
    record = record_from(content, str(path)) if isinstance(content, dict) else content
    if isinstance(record, LaunchRecord):
        return replace(record, made=with_environment(record.made, folder))
    return record


def newest_record(folder: RunFolder) -> tuple[LaunchRecord | None, list[Damage]]:
    """Return the newest launch here whose record is whole, and what is wrong with those of newer ones."""
    damages: list[Damage] = []
    for number in reversed(folder.launch_numbers()):
        record = record_in(folder.launch(number))
        if isinstance(record, LaunchRecord):
            return record, damages
        damages.append(record or Damage(str(folder.launch(number) / JOB_JSON), "is absent"))
    return None, damages


def last_record(folder: RunFolder, project_root: Path, warn: Callable[[str], None]) -> LaunchRecord:
    """Return how the run was launched last, as far as this machine's files tell; what is damaged is said.

    Raises:
        RecordError: nothing tells.
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
    """Return what JOB.json tells, found with what plan.json of *launch* says of the snapshots' place, if it can be had."""
    try:
        snapshots = read_plan(launch).snapshots
        uri, prefix = snapshot_place(snapshots.uri, folder, project_root)
        catalog = Catalog(Storage(uri, snapshots.options), prefix)
    except ElasticflowError:  # without it: where they are unless the job says otherwise
        catalog = Catalog(Storage(str(folder.path)))
    with suppress(OSError, ElasticflowError):
        content = catalog.inspect_job_record()
        if isinstance(content, dict):
            record = record_from(content, f"{catalog.storage.uri}/JOB.json")
            return record if isinstance(record, LaunchRecord) else None
    return None


def record_from(content: Mapping[str, Any], place: str) -> LaunchRecord | Damage:
    """Return what job.json or JOB.json tells, or what is wrong with it."""
    try:
        made = made_from(content)
        files = content.get("files")
        if files is None:  # JOB.json did not always tell
            own = [name for name, each in made.origins.sources.items() if JOB_FILE in each.roles]
            files = own if len(own) == 1 else None  # of several it is not told which is the job's
        return LaunchRecord(
            place,
            made,
            None if files is None else _texts(files, "files"),
            _texts(content.get("overrides") or [], "overrides"),
            _text_or_none(content.get("case"), "case"),
            _text_or_none(content.get("root"), "root"),
            str(content.get("digest") or ""),
        )
    except ElasticflowError as error:
        return Damage(place, f"is not what this version writes: {error.message}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a ValidationError is a ValueError
        text = str(error).strip().splitlines() or [""]
        return Damage(place, f"is not what this version writes: {type(error).__name__}: {text[0]}")


def rendered_again(record: LaunchRecord, project_root: Path) -> str:
    """Return train.py as this version makes it for the launch that *record*, which tells its files and root, describes."""
    assert record.files is not None
    assert record.root is not None
    return render(
        record.made.job,
        forms=call_forms(record.made.job, project_root),
        digest=record.digest,
        job_file=record.files[0],
        root=record.root,
        overrides=record.overrides,
        case=record.case,
    )


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{what} is no list of texts")
    return tuple(value)


def _text_or_none(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} is no text")
    return value
