"""Where a launch comes from: git state and versions, for job.json (floor 2)."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PACKAGES = ("elasticflow", "torch", "numpy", "safetensors", "fsspec")
_LIMIT_S = 10.0


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(project_root: Path) -> dict[str, str | bool] | None:
    """Return commit and cleanness of the project's checkout; None outside of git or without it."""
    commit = _git(project_root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(project_root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "is_clean": changes == ""}


def _git(folder: Path, *arguments: str) -> str | None:
    argv = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
