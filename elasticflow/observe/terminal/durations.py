"""Durations by activity, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import span
from elasticflow.system.records import float_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_MINUTE_S = 59.95


def parts_of(value: object) -> dict[str, float]:
    """Return the parts in *value*, which is from an event or a state file; empty if it has another form."""
    if not isinstance(value, dict):
        return {}
    return {str(name): seconds for name in value if (seconds := float_of(value, name)) is not None}


def took(parts: Mapping[str, float], *, is_blind: bool = False) -> str:
    """Return `11.7 s: starting 6.4 s, training 4.3 s, ending 1.0 s`; negligible parts are left out.

    Args:
        parts: Seconds by activity.
        is_blind: The workers report no steps: that their script ran is known, that it trained is not.
    """
    parts = {activity_word(name, is_blind=is_blind): parts[name] for name in parts}
    total = sum(parts.values())
    least = 1.0 if total >= _MINUTE_S else 0.05
    words = [f"{name} {span(seconds)}" for name, seconds in parts.items() if seconds >= least]
    return f"{span(total)}: {', '.join(words)}" if words else span(total)


def activity_word(name: str, *, is_blind: bool) -> str:
    """Return the word for a part of the time, which is the script's in a run that *is_blind*."""
    return "script" if is_blind and name == "training" else name


def goodput(parts: Mapping[str, float]) -> float | None:
    """Return the share (0 to 1) of the time for steps that count; None if no time is known."""
    total = sum(parts.values())
    return parts.get("training", 0.0) / total if total > 0 else None


def percent(share: float | None) -> str:
    """Return `93.4 %`, rounded down so that 100 % means everything; `-` for None."""
    return "-" if share is None else f"{math.floor(1000 * share) / 10:.1f} %"
