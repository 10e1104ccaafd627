"""Decides when a snapshot is due, when a state is held in memory, and which snapshots stay: pure policies, without I/O."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from elasticflow.system.units import parse_duration, parse_interval

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from elasticflow.protocol.snapshot_settings import Keep
    from elasticflow.snapshots.format.manifest import Manifest

# Attribute of a `HasPosition`, by the unit of an interval.
_FIELDS = {"step": "step", "epoch": "epoch", "sample": "samples"}
_TRIGGERS = (("epoch", "epoch"), ("step", "steps"), ("samples", "samples"))
# Reasons to stay, in the order for display. The permanent ones outlast newer snapshots: only a better metric, an unpin or
# another rule ends them.
PERMANENT = ("pinned", "best", "every")
REASONS = (*PERMANENT, "newest", "parent", "last", "within", "in use", "borrowed")


class HasPosition(Protocol):
    """A position in training, as far as a policy needs it."""

    @property
    def step(self) -> int:
        """Finished steps."""

    @property
    def epoch(self) -> int:
        """Finished epochs."""

    @property
    def samples(self) -> int:
        """Samples consumed."""


@dataclass(frozen=True)
class Due:
    """Several intervals, by any of which something is due.

    A counted interval is due when a multiple of it was reached or passed since the last time: the answer depends on
    positions alone, and is the same on every rank and after a resume. Time is an argument: one rank measures it.

    Attributes:
        every: Intervals as written in the job file: "500 steps", "10 min", "1 epoch", "10000 samples".
        seconds: The shortest of the time intervals, or None if there is none.
    """

    every: tuple[str, ...]
    seconds: float | None = field(init=False, repr=False, compare=False)
    _counted: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        intervals = tuple(parse_interval(text) for text in self.every)
        times = (interval.amount for interval in intervals if interval.unit == "s")
        object.__setattr__(self, "seconds", min(times, default=None))
        counted = tuple((_FIELDS[i.unit], int(i.amount)) for i in intervals if i.unit != "s")
        object.__setattr__(self, "_counted", counted)

    def is_due(self, previous: HasPosition, now: HasPosition, seconds: float = 0.0) -> bool:
        """Return whether it is due at *now*; *previous* is where it was last done or training began, *seconds* ago."""
        if now.step <= previous.step:
            return False
        # This runs at every step, so it calls nothing.
        for name, amount in self._counted:
            if getattr(now, name) // amount > getattr(previous, name) // amount:
                return True
        return self.is_due_by_time(seconds)

    def trigger(self, previous: HasPosition, now: HasPosition) -> str:
        """Return the kind of interval by which it is due at *now*: "epoch", "steps" or "samples"; "time" if no counted one."""
        reached = {
            name
            for name, amount in self._counted
            if getattr(now, name) // amount > getattr(previous, name) // amount
        }
        return next((word for name, word in _TRIGGERS if name in reached), "time")

    def is_due_by_time(self, seconds: float) -> bool:
        """Return whether it is due by the clock alone."""
        return self.seconds is not None and seconds >= self.seconds


class BoundedShare:
    """Decides when a repeated action is due again, so that it takes at most a `SHARE` of the time.

    Time is an argument. A clock that was set back begins the pause anew. The cost is the median of the last three, so that a single
    measurement that is far too long (the process was suspended) does not count. Waits for other ranks vary more, since the action
    takes over waits of the next step: the median of the last `_WAITS` counts.

    Args:
        expected: Seconds that the first action is expected to take.
    """

    SHARE = 1 / 50
    _WAITS = 8

    def __init__(self, now: float, expected: float) -> None:
        self._since, self._taken = now, deque([expected], maxlen=3)
        self._waited = deque([0.0], maxlen=self._WAITS)
        self._is_measured = False

    def is_due(self, now: float) -> bool:
        """Return whether the action may be done at *now*."""
        self._since = min(self._since, now)
        cost = statistics.median_low(self._taken) + statistics.median(self._waited)
        return (now - self._since) * self.SHARE >= cost

    def begin(self, now: float) -> None:
        """Note that the action begins at *now*; `spent` adds its duration."""
        if not self._is_measured:
            self._taken.clear()
            self._waited.clear()
        self._is_measured, self._since = True, now
        self._taken.append(0.0)
        self._waited.append(0.0)

    def spent(self, seconds: float, waited: float = 0.0) -> None:
        """Add *seconds* to the cost of the last action, and *waited* to its waits for other ranks."""
        self._taken[-1] += max(0.0, seconds)
        self._waited[-1] += max(0.0, waited)


def reasons(
    snapshots: Iterable[Manifest],
    rules: Keep,
    *,
    pinned: Collection[str] = (),
    in_use: Collection[str] = (),
) -> dict[str, set[str]]:
    """Return the names of the committed snapshots that stay, each with its reasons.

    A reason is `newest`, `parent` (of the newest), `last`, `within`, `best`, `every`, `pinned`, `in use` or `borrowed`
    (a snapshot that stays refers to its files). Reasons of PERMANENT outlast newer snapshots, the others pass.

    Args:
        snapshots: The committed snapshots that can be restored, without those set aside.
        in_use: Names of snapshots that must not go now, such as the one that was restored.
    """
    newest_first = sorted(snapshots, key=lambda s: (s.generation, s.step, s.name), reverse=True)
    staying: dict[str, set[str]] = {}
    if not newest_first:
        return staying
    newest = newest_first[0]
    by_reason: dict[str, Collection[str | None]] = {
        "newest": {newest.name},
        "parent": {newest.parent},
        "last": {snapshot.name for snapshot in newest_first[: rules.last]},
        "within": _recent(newest_first, rules.within),
        "best": _best(newest_first, rules),
        "every": _milestones(newest_first, rules.every),
        "pinned": pinned,
        "in use": in_use,
    }
    for snapshot in newest_first:
        if why := {reason for reason, names in by_reason.items() if snapshot.name in names}:
            staying[snapshot.name] = why
    _add_owners(staying, {snapshot.name: snapshot.borrowed_from for snapshot in newest_first})
    return staying


def _add_owners(staying: dict[str, set[str]], borrowed_from: Mapping[str, Collection[str]]) -> None:
    """Add to *staying* every snapshot to whose files a staying snapshot refers, directly or not."""
    todo = list(staying)
    while todo:
        for owner in borrowed_from[todo.pop()]:
            if owner in borrowed_from:
                if owner not in staying:
                    todo.append(owner)
                staying.setdefault(owner, set()).add("borrowed")


def _recent(newest_first: list[Manifest], within: str | None) -> set[str]:
    """Return the snapshots within that time before the newest; no clock is read, so a job that paused loses none.

    A snapshot that seems younger than a later one was taken before the clock was set back: it counts as old as the later one.
    """
    if within is None:
        return set()
    oldest = newest_first[0].created - parse_duration(within)
    created = itertools.accumulate((snapshot.created for snapshot in newest_first), min)
    return {snapshot.name for snapshot, at in zip(newest_first, created, strict=True) if at >= oldest}


def _best(newest_first: list[Manifest], rules: Keep) -> set[str]:
    if not rules.best or rules.best_mode is None:
        return set()
    sign = -1.0 if rules.best_mode == "max" else 1.0
    measured = [s for s in newest_first if s.metric is not None and not math.isnan(s.metric)]
    comparable = [s for s in measured if _is_measured_like(s, measured[0])]
    ranked = sorted(((sign * (s.metric or 0.0), s.name) for s in comparable), key=lambda pair: pair[0])
    return {name for _, name in ranked[: rules.best]}


def _is_measured_like(one: Manifest, other: Manifest) -> bool:
    """Return whether two metrics can be compared: the same measure, by the same code, on the same data."""
    return all(
        now is None or then is None or now == then
        for now, then in zip(one.measured_by, other.measured_by, strict=True)
    )


def _milestones(newest_first: list[Manifest], every: str | None) -> set[str]:
    if every is None:
        return set()
    interval = parse_interval(every)
    first: dict[int, str] = {}
    for snapshot in sorted(newest_first, key=lambda s: (s.step, s.generation), reverse=True):
        # The oldest of each multiple is written last and stays.
        count = getattr(snapshot, _FIELDS.get(interval.unit, "created"))
        first[int(count // interval.amount)] = snapshot.name
    first.pop(0, None)
    return set(first.values())
