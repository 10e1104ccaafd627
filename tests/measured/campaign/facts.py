"""On what a campaign was run, for the head of its table."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version

from elasticflow import __version__


def head() -> dict[str, object]:
    """Return what the head of a table says: date, facts, cores, commit."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "facts": versions(),
        "cores": os.cpu_count(),
        "commit": commit(),
    }


def versions() -> str:
    """Return the versions that matter, in words."""
    found = {
        "elasticflow": __version__,
        "torch": version("torch"),
        "Python": platform.python_version(),
        platform.system(): platform.release().partition("-")[0],
    }
    return ", ".join(f"{name} {value}" for name, value in found.items())


def commit() -> str:
    """Return the commit of the working tree, shortened; `unknown` without git."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"
