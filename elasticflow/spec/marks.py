"""What a model says of a key besides its type (floor 1)."""

from __future__ import annotations

from typing import NamedTuple


class MayRefer(NamedTuple):
    """The key's texts may hold references: `${env:NAME}` and its kind (see `spec/cases/references.py`).

    Attributes:
        instead: What it is checked as where a reference is not looked up; None: as it is written.
    """

    instead: str | None = None


class Variable(NamedTuple):
    """A variable of the environment, and what stands for it where it is not set or empty."""

    name: str
    default: str | None


Spelled = tuple[str | Variable, ...]
"""A text that holds secrets, piece by piece: what generated code has instead of them."""
