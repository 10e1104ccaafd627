"""Finds the snapshots that a command means, by a run or a URI."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.errors import ElasticflowError, RunNotFoundError, SnapshotNotFoundError
from elasticflow.observe.runs import find_run
from elasticflow.run_folder import RUN_ID, SNAPSHOT_NAME, snapshot_place
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.protocol.snapshot_settings import Keep
    from elasticflow.run_folder import RunFolder

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_ONE = re.compile(rf"(?P<run>.+?)/+snapshots/+(?P<name>{SNAPSHOT_NAME.pattern})/*", re.DOTALL)
_MARKS = frozenset({"snapshots", "generations", "JOB.json"})  # any of these entries makes a folder a run's
_MOST_NAMED = 5


@dataclass(frozen=True)
class SnapshotSource:
    """A run's snapshots and their place.

    Attributes:
        folder: The run's folder on this machine; None if only a URI was given.
        job: The recorded job that took the snapshots; None if unknown.
        name: The snapshot whose path the command names, if any.
        damage: Damaged records of the run, and their replacements.
    """

    catalog: Catalog
    folder: RunFolder | None = None
    job: Job | None = None
    name: str | None = None
    damage: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The run's address, without secrets."""
        prefix = self.catalog.prefix.rstrip("/")
        return f"{self.catalog.storage.uri.rstrip('/')}/{prefix}" if prefix else self.catalog.storage.uri

    @property
    def label(self) -> str:
        """Job and run id, or else the URI."""
        return self.uri if self.folder is None else f"{self.folder.job} {self.folder.run_id}"

    @property
    def rules(self) -> Keep | None:
        """The job's rules for keeping snapshots; None if the job is not known."""
        from elasticflow.compiler.plan.launch_plan import snapshot_settings

        return None if self.job is None else snapshot_settings(self.job).keep


def find_source(
    project_root: Path, text: str | None, options: Mapping[str, Any] | None = None
) -> SnapshotSource:
    """Return the source that *text* means: a run as for `find_run`, or a path or URL of a run's snapshots.

    A path or URL of a single snapshot means its run, and sets `name`.

    Args:
        text: Text as the user typed it; None: the project's newest run.
        options: Options for the file system, over those of the job.

    Raises:
        RunNotFoundError: there is no such run.
        SnapshotNotFoundError: the path or URL has no snapshots of a run.
        OSError: the place cannot be read.
    """
    options = dict(options or {})
    if text is None:
        return _of_run(find_run(project_root, None, by_hand=True), options)
    if match := _ONE.fullmatch(text):
        return replace(find_source(project_root, match["run"], options), name=match["name"])
    if URL.match(text):
        return _at(text, options)
    try:
        return _of_run(find_run(project_root, text, by_hand=True), options)
    except RunNotFoundError:
        if not Path(text).is_dir():
            raise
        return _at(text, options)


def _of_run(folder: RunFolder, options: dict[str, Any]) -> SnapshotSource:
    from elasticflow.compiler.launch_folder import last_record

    root = folder.project_root
    damage: list[str] = []
    job = last_record(folder, root, damage.append).made.job if folder.launch_numbers() else None
    uri = None if job is None else job.snapshots.uri
    uri, prefix = snapshot_place(uri, folder, root)
    if job is not None:
        options = {**job.snapshots.options, **options}
    return SnapshotSource(Catalog(Storage(uri, options), prefix), folder, job, damage=tuple(damage))


def _at(uri: str, options: dict[str, Any]) -> SnapshotSource:
    storage = Storage(uri, options)
    names = storage.list()
    if not _MARKS.intersection(names):
        catalog = Catalog(storage, f"{_only_run(storage, names)}/")
    else:
        catalog = Catalog(storage)
    return SnapshotSource(catalog, job=_recorded_job(catalog))


def _only_run(storage: Storage, names: list[str]) -> str:
    """Return the only run among *names*, for a URI under which runs have their own folders."""
    runs = [name for name in names if RUN_ID.fullmatch(name) and _MARKS.intersection(storage.list(name))]
    if not runs:
        raise SnapshotNotFoundError(
            f"there are no snapshots of a run at {storage.uri}",
            "give a run's own folder, which holds `snapshots` and `generations`, or a run of this project",
        )
    if len(runs) > 1:
        newest = ", ".join(sorted(runs, reverse=True)[:_MOST_NAMED])
        raise SnapshotNotFoundError(
            f"there are {len(runs)} runs at {storage.uri}, such as {newest}",
            f"say which: {storage.uri.rstrip('/')}/{max(runs)}",
        )
    return runs[0]


def _recorded_job(catalog: Catalog) -> Job | None:
    from pydantic import ValidationError

    from elasticflow.compiler.provenance.job_json import job_from_json

    record = catalog.read_job_record()
    try:
        return None if record is None else job_from_json(record["job"])
    except (ElasticflowError, ValidationError, KeyError, TypeError, ValueError, AttributeError):
        # The record was written by another version.
        return None
