"""The elasticflow that runs: its version, its folder, processes of its modules; installed packages, and versions of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "0.1.0"

ABOVE_PACKAGE = Path(__file__).resolve().parents[2]
"""Folder in which Python finds this very package."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_of_installed_package(path: str) -> bool:
    """Return True if the file at *path* is a package's that pip or the system has installed, in whatever environment."""
    return any(part in path for part in _INSTALLED)


def module_command(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs *module* of elasticflow; modules in its working folder are not imported (`-P`)."""
    return [sys.executable, *options, "-P", "-m", module, *arguments]


def start_module(module: str, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start *module* of this very package, with pipes to its standard input and output.

    It runs in this process's working folder, since options and the environment may name files by relative paths, of
    credentials for instance; modules in that folder are not imported.
    """
    paths = filter(None, (str(ABOVE_PACKAGE), os.environ.get("PYTHONPATH")))
    return subprocess.Popen(
        [python, *module_command(module)[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


TORCH_TRIED = ("2.13", "2.14", "2.15")
"""Minor versions of torch that elasticflow was tried with; `pyproject.toml` allows the same range, and the guide (figures) says what was run on which."""


def untried_torch(version: str) -> str | None:
    """Return the sentence that says so if torch *version* (`2.16.0+cpu`) is of a minor version never tried, else None."""
    if ".".join(version.split(".")[:2]) in TORCH_TRIED:
        return None
    return f"torch {version} has not been tried with this version of elasticflow; {torch_tried()} have"


def torch_tried() -> str:
    """Return the versions as words: `2.13, 2.14 and 2.15`."""
    *others, last = TORCH_TRIED
    return f"{', '.join(others)} and {last}"


def torch_requirement() -> str:
    """Return the range as pip takes it: `torch>=2.13,<2.16`."""
    major, minor = TORCH_TRIED[-1].split(".")
    return f"torch>={TORCH_TRIED[0]},<{major}.{int(minor) + 1}"
