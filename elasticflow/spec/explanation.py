"""What is told about one code (floor 1)."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """What `elasticflow explain` prints about one code."""

    title: str
    why: str
    bad: str = ""
    good: str = ""
