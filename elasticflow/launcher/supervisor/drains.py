"""The drain that is under way: all workers leave after the same step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import events

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal

TOO_LATE = "the grace ended before the workers left"
UNTRAINED_S = 5.0


@dataclass(frozen=True)
class Drain:
    """Why workers were asked to leave.

    Attributes:
        ends: The launch ends then; else the next generation follows.
        kind: A class of `failure_classes.CLASSES`.
        reason: In words.
        asked: When, on the monotonic clock.
    """

    ends: bool
    kind: str
    reason: str
    asked: float


class Drains:
    """The drains of a launch, one at a time; each has *grace_s* seconds, or *untrained_s* before the run's first step.

    Attributes:
        now: The one that is under way.
    """

    def __init__(self, journal: Journal, grace_s: float, untrained_s: float) -> None:
        self._journal, self._grace_s, self._untrained_s = journal, grace_s, min(grace_s, untrained_s)
        self.now: Drain | None = None

    def ask(self, kind: str, reason: str, *, ends: bool) -> None:
        """Begin one; it takes the place of one that is under way."""
        self.now = Drain(ends, kind, reason, time.monotonic())
        self._journal.event(events.DRAIN_REQUESTED, reason=reason, grace_s=self._limit_s())

    def take(self) -> Drain | None:
        """Return the one that is under way, if any: its generation has ended, and it with it."""
        found, self.now = self.now, None
        return found

    def late(self, now: float) -> Drain | None:
        """Return the one that is under way if its time, counted from the request, is over."""
        return self.now if self.now is not None and now >= self.now.asked + self._limit_s() else None

    def _limit_s(self) -> float:
        """Return the grace: a run that has not finished a step has nothing to save, and may be compiling for minutes."""
        return self._grace_s if self._journal.state["step"] > 0 else self._untrained_s

    def completed(self, drain: Drain) -> None:
        """Tell that all workers have left as *drain* asked."""
        seconds = round(time.monotonic() - drain.asked, 3)
        self._journal.event(events.DRAIN_COMPLETED, step=self._journal.state["step"], seconds=seconds)
