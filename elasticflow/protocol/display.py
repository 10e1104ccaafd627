"""Records that are shown to a person and stand in no log: what is known of a run beside its events, and what rank 0 prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.protocol.messages import PrintedLine

KNOWN = "known"
PRINTED = "printed"
SHOWN_OF_STATE = ("epochs", "budget_left", "activities")
"""Fields of state.json that no event tells.

- `epochs`: passes over the data in all, if the job says them.
- `budget_left`: restarts left in the budget.
- `activities`: by node, what it has been at for longer than a moment: `phase`, `subject` and `step` as in `Activity`, and
  `since`, the unix time at which that began.
"""


def known_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of what *state*, of state.json, says beside the events."""
    return {KNOWN: {name: state.get(name) for name in SHOWN_OF_STATE}}


def printed_record(lines: Sequence[PrintedLine], left_out: int) -> dict[str, Any]:
    """Return the record of lines that rank 0 printed, and of how many were left out before them."""
    return {PRINTED: [line._asdict() for line in lines], "left_out": left_out}


def is_only_shown(record: Mapping[str, Any]) -> bool:
    """Return whether *record* stands in no log."""
    return KNOWN in record or PRINTED in record
