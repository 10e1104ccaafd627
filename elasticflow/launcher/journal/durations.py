"""Parts of a launch's time, and of all the run's launches: every moment counts in one part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.launcher.restarts.failure_classes import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STARTING, RESTORING, TRAINING, REDONE, STALLED, EVALUATING, DETECTING, RESTARTING, WAITING, ENDING, OUTAGE = (
    PARTS
) = (
    "starting",  # until the first group trains
    "restoring",  # a snapshot is found, read, verified and applied
    "training",  # steps that count, with their data
    "redone",  # steps that were lost and done again, the first time they were done
    "stalled",  # training waits while a snapshot is copied
    "evaluating",
    "detecting",  # from a failure until all workers of the group are gone
    "restarting",  # from the end of one group until the next one trains
    "waiting",  # fewer nodes are there than the job needs
    "ending",  # the last snapshot is written, processes exit
    "outage",  # from the last sign of life of a supervisor that was lost until the next launch
)
Parts = dict[str, float]
"""Seconds of each part."""

# Events of what took time of training: the field with the seconds, and the part that they belong to.
_WITHIN_TRAINING = {
    events.EVALUATION: ("seconds", EVALUATING),
    events.SNAPSHOT_STAGED: ("stall_s", STALLED),
}
# Classes of a generation after which no other one is formed.
_LEFT_FOR_GOOD = frozenset({"finished", "drained"})


class Durations:
    """Counts the parts; `saw` has to be called with every record, in order.

    Args:
        before: The parts of the run's earlier launches; None: unknown.
        clock: Returns seconds. The launch begins with its first event.
    """

    def __init__(self, before: Mapping[str, float] | None, clock: Callable[[], float]) -> None:
        self._before, self._clock = before if before is None else dict(before), clock
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = STARTING, clock()
        self._waited_in = STARTING
        self._script: tuple[str, float] | None = (
            None  # what it was started in, and the seconds of training before
        )
        self._told = dict.fromkeys(PARTS, 0.0)
        self._final: Parts | None = None

    def saw(self, record: Mapping[str, Any]) -> None:
        """Take note of one event, or of one line about a step or an evaluation."""
        match record.get("event"):
            case events.RUN_STARTED:
                self._since = self._clock()
                if record.get("resumed") and not self._before:
                    self._before = None  # earlier launches left their files on another machine
            case events.EVALUATION | events.SNAPSHOT_STAGED as name:
                seconds, part = _WITHIN_TRAINING[name]
                self._move(record.get(seconds), TRAINING, part)
            case events.TRAINING_STARTED:
                self._end_preparation()
                self._move(record.get("restore_s"), self._part, RESTORING)
                self._begin(TRAINING)
            case events.SCRIPT_STARTED:
                # Work that a script repeats is unknown, unless its loop tells where it begins.
                preparing = self._part
                self._begin(TRAINING)
                self._script = (preparing, self._parts[TRAINING])
            case events.TRAINING_FINISHED | events.BUDGET_SPENT:
                self._begin(ENDING)
            case events.GENERATION_ENDED:
                outcome = str(record.get("class"))
                if outcome not in OUTCOMES:
                    self._move(record.get("seconds_since_failure"), self._part, DETECTING)
                self._begin(ENDING if outcome in _LEFT_FOR_GOOD else RESTARTING)
            case events.NODE_AWAITED | events.GENERATION_STARTED as name:
                self._wait(begins=name == events.NODE_AWAITED)
            case _:
                pass

    def redone(self, seconds: float) -> None:
        """Count *seconds* of training, of this launch as far as it has them, as lost: its steps are done again."""
        self._begin(self._part)
        missing = self._shift(self._parts, seconds, TRAINING, REDONE)
        if missing > 0 and self._before:
            self._shift(self._before, missing, TRAINING, REDONE)

    def of_launch(self) -> Parts:
        """Return the parts of this launch so far, to the millisecond."""
        if self._final is not None:
            return self._final
        parts = {**self._parts, self._part: self._parts[self._part] + self._clock() - self._since}
        return {name: round(seconds, 3) for name, seconds in parts.items()}

    def of_run(self, launch: Parts | None = None) -> Parts | None:
        """Return the parts of all launches so far; None if those of earlier launches are unknown.

        Args:
            launch: Result of `of_launch`, where both are recorded as of one moment; None: as of now.
        """
        if self._before is None:
            return None
        launch = self.of_launch() if launch is None else launch
        return {name: round(seconds + self._before.get(name, 0.0), 3) for name, seconds in launch.items()}

    def end_group(self) -> Parts:
        """Return the parts since the last call, or since the launch began; negative where time was counted anew."""
        parts = self.of_launch()
        since = {name: round(seconds - self._told[name], 3) for name, seconds in parts.items()}
        self._told = parts
        return {name: seconds for name, seconds in since.items() if seconds}

    def figures(self) -> dict[str, Any]:
        """Return fields for an event at the launch's end; from now on the parts stay as they are.

        `seconds` is the sum of `durations`.
        """
        parts = self._final = self.of_launch()
        return {
            "seconds": round(sum(parts.values()), 3),
            "durations": parts,
            "run_durations": self.of_run(parts),
        }

    def _wait(self, *, begins: bool) -> None:
        if begins and self._part in (STARTING, RESTARTING):
            self._waited_in = self._part
            self._begin(WAITING)
        elif not begins and self._part == WAITING:
            self._begin(self._waited_in)

    def _end_preparation(self) -> None:
        """Count what a script has done before its loop, such as its imports, as that of the part in which it was started."""
        if self._script is None:
            return
        (part, trained), self._script = self._script, None
        self._begin(part)
        self._shift(self._parts, self._parts[TRAINING] - trained, TRAINING, part)

    def _begin(self, part: str) -> None:
        now = self._clock()
        self._parts[self._part] += now - self._since
        self._part, self._since = part, now

    def _move(self, seconds: object, old: str, new: str) -> None:
        """Count *seconds* that have counted as *old* as *new*."""
        self._begin(self._part)
        if isinstance(seconds, int | float):
            self._shift(self._parts, seconds, old, new)

    @staticmethod
    def _shift(parts: Parts, seconds: float, old: str, new: str) -> float:
        """Have *seconds* of *old* count as *new*, as far as there are so many; return how many were missing."""
        moved = min(max(0.0, float(seconds)), parts.get(old, 0.0))
        parts[old] = parts.get(old, 0.0) - moved
        parts[new] = parts.get(new, 0.0) + moved
        return seconds - moved


def read_parts(record: object) -> Parts | None:
    """Return the parts that *record*, from a state file, holds; None if it is something else.

    Those that the version which wrote it did not know are 0.
    """
    if not isinstance(record, dict) or not record.keys() & set(PARTS):
        return None
    parts = {name: record.get(name, 0.0) for name in PARTS}
    if not all(isinstance(seconds, int | float) and seconds >= 0 for seconds in parts.values()):
        return None
    return {name: float(seconds) for name, seconds in parts.items()}
