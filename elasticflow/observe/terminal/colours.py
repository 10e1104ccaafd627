"""Abilities of a stream: colours (by the same policy in all commands), signs beyond ASCII, and redrawing in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping


def colour_choice(environment: Mapping[str, str]) -> bool | None:
    """Return the user's choice by NO_COLOR, then FORCE_COLOR, then TERM=dumb; None: colours on a terminal only."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in {"", "0"}:
        return True
    return False if environment.get("TERM") == "dumb" else None


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if *stream* gets colours."""
    choice = colour_choice(environment)
    return stream.isatty() if choice is None else choice


def can_redraw(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if lines of *stream* can be redrawn in place; a terminal without TERM counts as dumb."""
    return stream.isatty() and environment.get("TERM", "dumb") != "dumb"


def speaks_utf8(stream: TextIO) -> bool:
    """Return True if *stream* takes signs beyond ASCII."""
    return (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"
