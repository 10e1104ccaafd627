"""Job file -> Job: every problem of every file at once, each with its place (floor 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import JobRefusedError
from elasticflow.spec import codes
from elasticflow.spec.checks import check
from elasticflow.spec.diagnostics import in_order, render
from elasticflow.spec.entry_points import check_entry_points
from elasticflow.spec.job import Job
from elasticflow.spec.source import load
from elasticflow.spec.tables import read_tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.spec.diagnostics import Diagnostic


@dataclass(frozen=True)
class LoadedJob:
    """What became of a job file.

    Attributes:
        path: The job file as it was named.
        project_root: Where the job's own code is found from.
        files: The job file and every file it extends.
        job: The job; None when a diagnostic is an error.
        diagnostics: Errors, warnings and notes in order of their place.
    """

    path: Path
    project_root: Path
    files: tuple[Path, ...]
    job: Job | None
    diagnostics: list[Diagnostic]


def project_root_of(path: Path) -> Path:
    """Return the nearest folder at or above the job file's that holds pyproject.toml or .git.

    Without one it is the job file's folder, or the folder above when that is called `jobs`.
    """
    folder = path.absolute().parent
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file() or (candidate / ".git").exists():
            return candidate
    return folder.parent if folder.name == "jobs" else folder


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the job, or every reason why there is none; never raises for what the file holds."""
    source = load(path, overrides)
    root = project_root_of(path)
    if not any(layer.is_file for layer in source.layers):  # the job file itself cannot be read
        return LoadedJob(path, root, source.files, None, in_order(source.problems))
    tables, found = read_tables(source)
    if source.problems:  # what a base would have given must not be called missing
        found = [each for each in found if each.code not in {codes.MISSING, codes.EXCLUSIVE}]
    found += [*source.problems, *check(source, tables), *check_entry_points(source, root)]
    has_errors = any(each.severity == "error" for each in found)
    # Every table has been validated: built from them, the job's own schema (15 ms) is not needed.
    job = None if has_errors else Job.model_construct(_fields_set=set(source.raw), **tables)
    return LoadedJob(path, root, source.files, job, in_order(found))


def require_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the loaded job, which has no errors.

    Raises:
        JobRefusedError: it has; the message is the rendered diagnostics.
    """
    loaded = load_job(path, overrides)
    if loaded.job is None:
        raise JobRefusedError(render([each for each in loaded.diagnostics if each.severity != "note"]))
    return loaded
