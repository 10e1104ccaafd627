"""Positions of a schedule that tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.runtime.data.index_schedule import IndexSchedule
    from elasticflow.runtime.process.position import Position


def end_of(schedule: IndexSchedule) -> Position:
    """Return the position after the last step."""
    position = schedule.start
    while not schedule.is_end(position):
        position = schedule.batch(position)[2]
    return position
