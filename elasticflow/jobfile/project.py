"""The root of a job file's project, its job files, and the bases that are no whole jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.run_folder import RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_ENTERED = {RUNS, "__pycache__", "node_modules", "site-packages"}


def project_root_of(path: Path) -> Path:
    """Return the nearest folder at or above the job file's that holds pyproject.toml or .git.

    Without such a folder, it is the job file's folder, or the folder above if the job file's folder is called `jobs`.
    """
    folder = path.absolute().parent
    if ".." in folder.parts:  # else `parents` are not the folders above it
        folder = folder.resolve()
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file() or (candidate / ".git").exists():
            return candidate
    return folder.parent if folder.name == "jobs" else folder


def current_project_root() -> Path:
    """Return the project root above the working folder."""
    return project_root_of(Path.cwd() / "job.toml")


def job_files_in(folder: Path) -> list[Path]:
    """Return the job files in *folder*: those in folders called `jobs` and `*.job.toml`, at any depth.

    Without any of these, the TOML files of *folder* itself except pyproject.toml.
    """
    paths = sorted(files_below(folder, ".toml"))
    found = [
        each for each in paths if each.parent.resolve().name == "jobs" or each.name.endswith(".job.toml")
    ]
    return found or [each for each in paths if each.parent == folder and each.name != "pyproject.toml"]


def files_below(folder: Path, ending: str) -> Iterator[Path]:
    """Yield the files of a folder at any depth whose names end so, sorted within each folder.

    Hidden folders, virtual environments, installed packages, and runs with their copies of sources are not entered.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_ENTERED
            and not Path(place, name, "pyvenv.cfg").exists()
        )
        yield from (Path(place, name) for name in sorted(files) if name.endswith(ending))


def job_file_called(root: Path, name: str) -> Path | None:
    """Return the job file of a project that a person calls *name*: by the file's name, else by the job's.

    None if there is none, or if several files have a job of that name.
    """
    files = job_files_in(root)
    for path in files:
        if path.name in (f"{name}.toml", f"{name}.job.toml"):
            return path
    named = [path for path in files if not is_base(path) and _name_of_job(path) == name]
    return named[0] if len(named) == 1 else None


def _name_of_job(path: Path) -> object:
    import tomli

    try:
        job = tomli.loads(path.read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError):
        return None
    return job.get("name") if isinstance(job, dict) else None


def is_base(path: Path) -> bool:
    """Return whether a file is a base by its name: `base.toml`, `large.base.toml` or `_large.toml`.

    Other job files extend a base, which is no whole job itself. The name decides, not the files that extend it: a hook
    sees only the changed files.
    """
    name = path.name.removesuffix(".toml").removesuffix(".job")
    return name == "base" or name.endswith(".base") or name.startswith("_")
