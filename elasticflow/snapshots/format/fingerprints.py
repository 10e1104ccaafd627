"""Fingerprints of data, as snapshots hold them.

A fingerprint is 16 hexadecimal digits. Where samples hold objects (a dataclass, PyG's `Data`), 16 more follow a dot: the
first ones are of the samples with objects known by their class alone, as older versions took them, the last ones of what the
objects hold. A dataset may give a text of its own instead.
"""

from __future__ import annotations

import re

_OF_BOTH = re.compile(r"([0-9a-f]{16})\.[0-9a-f]{16}")


def of_both(by_class: str, by_content: str) -> str:
    """Return the fingerprint of samples that hold objects."""
    return f"{by_class}.{by_content}"


def by_class(fingerprint: str) -> str:
    """Return the fingerprint that an older version would have recorded for the same data."""
    found = _OF_BOTH.fullmatch(fingerprint)
    return fingerprint if found is None else found[1]


def may_be_same(one: str, other: str) -> bool:
    """Return false if two fingerprints are of different data, as far as both of them tell."""
    return one == other or is_compared_by_class(one, other)


def is_compared_by_class(one: str, other: str) -> bool:
    """Return true if the two agree, and only one of them tells what the samples' objects hold."""
    return one != other and (by_class(one) == other or by_class(other) == one)
