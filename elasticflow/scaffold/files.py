"""The files that `init` writes: new ones only, each whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE
from elasticflow.scaffold.job_text import SCHEMA_NAME
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PRE_COMMIT = ".pre-commit-config.yaml"
HOOK_ID = "elasticflow-validate"
_HOOK = f"""\
repos:
  - repo: local
    hooks:
      - id: {HOOK_ID}
        name: elasticflow validate
        entry: elasticflow validate
        language: system
        types: [toml]
        files: (^|/)jobs/[^/]+\\.toml$|\\.job\\.toml$
"""


def write(files: Mapping[Path, str | bytes], elsewhere: str = "choose another name: --name or -o") -> None:
    """Write new files: all, or none if a file exists already; *elsewhere* says how to name another place.

    Raises:
        ScaffoldError: a file exists, or cannot be written.
    """
    existing = next((path for path in files if path.exists()), None)
    if existing is not None:
        raise ScaffoldError(f"{existing} exists already", f"nothing was written; {elsewhere}")
    for path, content in files.items():
        try:
            atomic_files.write(path, [content.encode() if isinstance(content, str) else content])
        except OSError as error:
            raise ScaffoldError(f"cannot write {path}: {error.strerror}") from error


def schema_file(job_file: Path) -> dict[Path, str]:
    """Return the schema file for editors beside *job_file*; nothing if it exists already."""
    path = job_file.parent / SCHEMA_NAME
    return {} if path.exists() else {path: SCHEMA_FILE.read_text("utf-8")}


def pre_commit_hook(root: Path) -> tuple[dict[Path, str], str]:
    """Return the pre-commit configuration to write, or the lines to add by hand to an existing one."""
    try:
        is_there = HOOK_ID.encode() in (root / PRE_COMMIT).read_bytes()
    except OSError:
        return {root / PRE_COMMIT: _HOOK}, ""
    return {}, "" if is_there else "\n".join(_HOOK.splitlines()[1:])
