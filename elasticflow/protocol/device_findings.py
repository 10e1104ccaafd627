"""The lines in which the check of a node's devices tells the agent about each device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

ANSWER_S = 60.0
"""Seconds for each device, and for the start: torch is imported, each context is opened."""


def longest_check_s(devices: int) -> float:
    """Return the seconds after which a check of so many *devices* gives no answer any more."""
    return (devices + 2) * ANSWER_S


@dataclass(frozen=True)
class Finding:
    """A line about one device.

    Attributes:
        device: Name that torch or the driver gives it, or both names.
        text: The error; empty if the device is well.
        is_fault: The device is not to be used before it is reset or replaced. False: an error that a device outlives.
        is_begun: The device is about to compute; its result follows, unless it never answers.
    """

    device: str
    text: str = ""
    is_fault: bool = False
    is_begun: bool = False

    def __str__(self) -> str:
        return f"{self.device}: {self.text}"

    def to_json(self) -> str:
        """Return the line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Finding | None:
        """Return the finding that a line tells; None if the line is something else, as a library's own words."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None
