"""Job file -> Job: every problem of every file at once, each with its place (floor 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.spec.job import Job


@dataclass(frozen=True)
class LoadedJob:
    """What became of a job file."""

    path: Path
    project_root: Path
    files: tuple[Path, ...]
    job: Job | None
    diagnostics: list[Any]


def project_root_of(path: Path) -> Path:
    """Return the nearest folder at or above the job file's that holds pyproject.toml or .git."""
    folder = path.absolute().parent
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file() or (candidate / ".git").exists():
            return candidate
    return folder.parent if folder.name == "jobs" else folder


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the job, or the reasons why there is none."""
    import tomli

    from elasticflow.spec.job import Job

    raw = tomli.loads(path.read_text("utf-8"))
    for text in overrides:
        key, _, value = text.partition("=")
        try:
            leaf = tomli.loads(f"v = {value}")["v"]
        except tomli.TOMLDecodeError:
            leaf = value
        *tables, last = key.strip().split(".")
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = leaf
    return LoadedJob(path, project_root_of(path), (path,), Job.model_validate(raw), [])


def require_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the loaded job.

    Raises:
        JobRefusedError: it has errors; the message is the rendered diagnostics.
    """
    return load_job(path, overrides)
