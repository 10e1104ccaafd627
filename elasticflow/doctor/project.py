"""Checks Python, packages, the checkout and editor files."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from elasticflow.doctor.check import Topic
from elasticflow.run_folder import RUNS
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.doctor.check import CheckResult, Needs

_PYTHON, _PROJECT = Topic("python"), Topic("project")
_FOR_TRAINING = ("numpy", "safetensors")
_LIMIT_S = 10
_SCHEMA_LINE = re.compile(r"^#:schema\s+(\S+)", re.MULTILINE)


def packages() -> Iterator[CheckResult]:
    """Yield the versions of Python, elasticflow and the packages that write snapshots."""
    yield _PYTHON.ok("python", f"{platform.python_version()}, {sys.executable}")
    yield _PYTHON.ok("elasticflow", VERSION)
    for name in _FOR_TRAINING:
        if importlib.util.find_spec(name) is None:
            meaning = "workers and snapshots need it"
            remedy = "pip install 'elasticflow[torch]'"
            yield _PYTHON.problem(name, "not installed", meaning, remedy)
        else:
            yield _PYTHON.ok(name, metadata.version(name))


def project(needs: Needs) -> Iterator[CheckResult]:
    """Yield the parts of the project by which a run is found and repeated."""
    yield from _git(needs.root)
    if needs.job_file is not None:
        yield from _schema(needs.job_file)


def _git(root: Path) -> Iterator[CheckResult]:
    if shutil.which("git") is None:
        meaning = "launches record no commit; `diff` still compares the files that took part"
        yield _PROJECT.warning("git", "not installed", meaning, "install git")
        return
    if _git_code(root, "rev-parse", "--is-inside-work-tree") != 0:
        yield _PROJECT.ok("git", "not a checkout: launches record the files that take part, and no commit")
        return
    yield _PROJECT.ok("git", "a checkout: launches record commit, branch and changes")
    runs = root / RUNS
    # A run that makes the folder has git ignore it.
    if runs.exists() and _git_code(root, "check-ignore", "-q", f"{RUNS}/x") != 0:
        meaning = "snapshots and logs would show up as changes, and could be committed"
        yield _PROJECT.warning(RUNS, "not ignored by git", meaning, f"echo '*' > {runs / '.gitignore'}")


def _git_code(root: Path, *words: str) -> int:
    """Return git's exit code; -1 if git cannot be run, or does not exit in time."""
    argv = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(argv, capture_output=True, timeout=_LIMIT_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return -1


def _schema(job_file: Path) -> Iterator[CheckResult]:
    from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE

    schema_line = _SCHEMA_LINE.search(job_file.read_text(encoding="utf-8-sig"))
    if schema_line is None:
        yield _PROJECT.ok(
            "schema", "not named in the job file; `elasticflow guide --help` tells what editors do with it"
        )
        return
    schema = schema_line[1]
    path = job_file.parent / schema
    remedy = f"elasticflow guide --schema job -o {path}"
    if "://" in schema:
        yield _PROJECT.ok("schema", schema)
        return
    try:
        is_same = json.loads(path.read_text("utf-8")) == json.loads(SCHEMA_FILE.read_text("utf-8"))
    except (OSError, ValueError) as error:
        meaning = "editors do not check the job file"
        yield _PROJECT.warning("schema", f"{path}: {error}", meaning, remedy)
        return
    if is_same:
        yield _PROJECT.ok("schema", f"{path} is that of this version")
    else:
        meaning = "editors check the job file against another version"
        yield _PROJECT.warning("schema", f"{path} is of another version", meaning, remedy)
