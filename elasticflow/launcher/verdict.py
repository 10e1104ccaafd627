"""How a launch ended (floor 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """How the launch ended: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: str
    fields: dict[str, Any]
