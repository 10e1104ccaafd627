"""Finds the Python files of a folder."""

from __future__ import annotations

import os
from pathlib import Path

from elasticflow.run_folder import RUNS

_LEFT_OUT = {RUNS, "__pycache__", "node_modules", "site-packages"}


def python_files_in(folder: Path) -> list[Path]:
    """Return the Python files of a folder at any depth, sorted.

    Hidden folders, virtual environments, installed packages, and runs with their copies of sources are left out.
    """
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_wanted(Path(place), name))
        found += [Path(place, name) for name in sorted(files) if name.endswith(".py")]
    return found


def _is_wanted(place: Path, name: str) -> bool:
    is_own = not name.startswith(".") and name not in _LEFT_OUT
    return is_own and not (place / name / "pyvenv.cfg").exists()
