"""The elasticflow that runs: its version, the folder that Python finds it in, and processes of its modules; installed packages."""

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
    """Return the command that runs *module* of elasticflow; modules in its working folder are not imported (`-P`).

    Args:
        options: Python's own options besides.
    """
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
