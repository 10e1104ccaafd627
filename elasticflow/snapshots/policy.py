"""When a snapshot is due and which ones stay: two small pure policies, without I/O (floor 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from elasticflow.spec.units import Interval, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterable

Best = Literal["max", "min"]


class Place(Protocol):
    """What a policy needs to know of a position in training."""

    @property
    def step(self) -> int:
        """Finished steps."""

    @property
    def epoch(self) -> int:
        """Finished epochs."""

    @property
    def samples(self) -> int:
        """Samples consumed."""


class Kept(Place, Protocol):
    """What retention needs to know of a committed snapshot; `Manifest` is one."""

    @property
    def name(self) -> str:
        """Unique name."""

    @property
    def generation(self) -> int:
        """Generation that took it."""

    @property
    def metric(self) -> float | None:
        """Value `keep.best` ranks by."""


@dataclass(frozen=True)
class Due:
    """Whether something is due at each of several intervals: any of them suffices.

    Counted intervals are due when a multiple of them was reached or passed since the last time, so the answer
    depends on positions alone and is the same on every rank and after a resume. Time is given as an argument:
    one rank measures it.

    Attributes:
        every: Intervals as written in the job file: "500 steps", "10 min", "1 epoch", "10000 samples".
    """

    every: tuple[str, ...]
    _intervals: tuple[Interval, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_intervals", tuple(parse_interval(text) for text in self.every))

    @property
    def seconds(self) -> float | None:
        """The shortest of the time intervals, or None if there is none."""
        return min((interval.amount for interval in self._intervals if interval.unit == "s"), default=None)

    def is_due(self, previous: Place, now: Place, seconds: float = 0.0) -> bool:
        """Return whether it is due at *now*, when it was last done (or training began) at *previous*, *seconds* ago."""
        if now.step <= previous.step:
            return False
        return any(_reached(interval, previous, now, seconds) for interval in self._intervals)

    def is_due_by_time(self, seconds: float) -> bool:
        """Return whether it is due by the clock alone."""
        return self.seconds is not None and seconds >= self.seconds


def _reached(interval: Interval, previous: Place, now: Place, seconds: float) -> bool:
    if interval.unit == "s":
        return seconds >= interval.amount
    return _passed(previous, now, interval)


def _passed(previous: Place, now: Place, interval: Interval) -> bool:
    amount = int(interval.amount)
    return _count(now, interval) // amount > _count(previous, interval) // amount


def _count(place: Place, interval: Interval) -> int:
    if interval.unit == "step":
        return place.step
    return place.epoch if interval.unit == "epoch" else place.samples


def keep(
    snapshots: Iterable[Kept],
    *,
    last: int,
    best: int | None = None,
    every: str | None = None,
    best_mode: Best | None = None,
) -> set[str]:
    """Return the names of the committed snapshots that stay; the newest always does.

    Args:
        snapshots: The committed snapshots that could be restored (none that is set aside).
        last: How many of the newest stay.
        best: How many of the best by metric stay as well; of equals, the newer.
        every: The first snapshot at or after each multiple of this interval stays as well.
        best_mode: Whether the largest or the smallest metric is the best; None: `best` keeps nothing.
    """
    newest_first = sorted(snapshots, key=lambda s: (s.step, s.generation, s.name), reverse=True)
    names = {snapshot.name for snapshot in newest_first[: max(last, 1)]}
    if best and best_mode is not None:
        sign = -1.0 if best_mode == "max" else 1.0
        measured = [
            (sign * s.metric, s.name)
            for s in newest_first
            if s.metric is not None and not math.isnan(s.metric)
        ]
        names |= {name for _, name in sorted(measured, key=lambda pair: pair[0])[:best]}
    if every is not None:
        names |= _milestones(newest_first, parse_interval(every))
    return names


def _milestones(newest_first: list[Kept], interval: Interval) -> set[str]:
    if interval.unit == "s":
        return set()
    first: dict[int, str] = {}
    for snapshot in newest_first:  # the oldest of each multiple is written last and stays
        first[_count(snapshot, interval) // int(interval.amount)] = snapshot.name
    first.pop(0, None)
    return set(first.values())
