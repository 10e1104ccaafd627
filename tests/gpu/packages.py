"""Prints what the tests for a GPU need, one requirement a line, with the versions of pyproject.toml; imports nothing but Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

# Beside what elasticflow itself needs to train; the other packages of the extra `dev` are for other tests.
_TESTING = ("hypothesis", "jsonschema", "pytest", "pytest-timeout")
# Of the build system, and what an editable installation without build isolation needs.
_BUILDING = ("editables",)


def requirements() -> list[str]:
    """Return the requirements; torch is among them, and is satisfied where a fitting one is installed."""
    project = tomllib.loads(
        (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )
    extras = project["project"]["optional-dependencies"]
    testing = [text for text in extras["dev"] if re.split(r"[^\w-]", text)[0] in _TESTING]
    assert len(testing) == len(_TESTING)
    return [
        *project["project"]["dependencies"],
        *extras["torch"],
        *testing,
        *project["build-system"]["requires"],
        *_BUILDING,
    ]


if __name__ == "__main__":
    print("\n".join(requirements()))
