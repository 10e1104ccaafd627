"""The changelog keeps to the form that it names: versions newest first, and under each the kinds of changes in their order."""

from __future__ import annotations

import re
from pathlib import Path

from elasticflow import __version__

TEXT = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text("utf-8")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_first_version_is_the_one_that_is_built() -> None:
    """What is written now belongs to it."""
    versions = re.findall(r"^## \[(.+?)\] - (unreleased|\d{4}-\d{2}-\d{2})$", TEXT, re.MULTILINE)
    assert versions[0][0] == __version__
    assert len(versions) == len(re.findall(r"^## ", TEXT, re.MULTILINE))


def test_kinds_of_changes_stand_in_their_order_once_each() -> None:
    """Each with changes under it, which are items of a list; a line in bold names a group of them."""
    for version in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
        for changes in re.split(r"^### .*\n", version, flags=re.MULTILINE)[1:]:
            lines = [line for line in changes.splitlines() if line]
            assert lines
            assert [] == [line for line in lines if not line.startswith(("- ", "  ", "**"))]
