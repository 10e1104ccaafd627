"""The elasticflow that runs: its version, the folder that Python finds it in, and processes of its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.1.0"

ABOVE_PACKAGE = Path(__file__).resolve().parents[2]
"""Folder in which Python finds this very package."""


def start_module(module: str, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start *module* of this very package, with pipes to its standard input and output.

    It runs in this process's working folder, since options and the environment may name files by relative paths, of
    credentials for instance; modules in that folder are not imported.
    """
    paths = filter(None, (str(ABOVE_PACKAGE), os.environ.get("PYTHONPATH")))
    return subprocess.Popen(
        [python, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
