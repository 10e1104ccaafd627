"""The versions of torch that elasticflow was tried with. Imports no torch."""

from __future__ import annotations

TRIED = ("2.13", "2.14", "2.15")
"""Its minor versions; `pyproject.toml` allows the same range, and the guide (figures) says what was run on which."""


def untried(version: str) -> str | None:
    """Return the sentence that says so if torch *version* (`2.16.0+cpu`) is of a minor version never tried, else None."""
    if ".".join(version.split(".")[:2]) in TRIED:
        return None
    return f"torch {version} has not been tried with this version of elasticflow; {tried()} have"


def tried() -> str:
    """Return the versions as words: `2.13, 2.14 and 2.15`."""
    *others, last = TRIED
    return f"{', '.join(others)} and {last}"


def requirement() -> str:
    """Return the range as pip takes it: `torch>=2.13,<2.16`."""
    major, minor = TRIED[-1].split(".")
    return f"torch>={TRIED[0]},<{major}.{int(minor) + 1}"
