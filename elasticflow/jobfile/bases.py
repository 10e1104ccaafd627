"""Files that other job files extend, and that are no whole job themselves: told by their name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob


def is_base(path: Path) -> bool:
    """Return whether a file is called a base: `base.toml`, `large.base.toml` or `_large.toml`.

    By its name, not by who extends it: a hook sees only the files that were changed.
    """
    name = path.name.removesuffix(".toml").removesuffix(".job")
    return name == "base" or name.endswith(".base") or name.startswith("_")


def as_base(loaded: LoadedJob) -> LoadedJob:
    """Return what became of a base: no job, and nothing said of what only a whole job must have."""
    found = [each for each in loaded.diagnostics if each.code not in {codes.MISSING, codes.EXCLUSIVE}]
    return loaded._replace(job=None, diagnostics=found)
