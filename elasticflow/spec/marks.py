"""What a model says of a key besides its type (floor 1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MayRefer:
    """The key's texts may hold references: `${env:NAME}` and its kind (see `spec/references.py`).

    Attributes:
        instead: What it is checked as where a reference is not looked up; None: as it is written.
    """

    instead: str | None = None
