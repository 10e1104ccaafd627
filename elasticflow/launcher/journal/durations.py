"""Where the time of a launch goes, and of all the run's launches: every moment counts in one part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STARTING, TRAINING, EVALUATING, RESTARTING, ENDING = PARTS = (
    "starting",  # until the first group trains
    "training",  # steps, with their data and snapshots
    "evaluating",
    "restarting",  # from the end of one group until the next one trains
    "ending",  # the last snapshot is written, processes leave
)
Parts = dict[str, float]
"""Seconds of each part."""

# Classes of a generation after which no other one is formed.
_LEFT_FOR_GOOD = frozenset({"finished", "drained"})


class Durations:
    """Counts the parts; `saw` has to be called with all that happens, in order.

    Args:
        before: The parts of the run's earlier launches; None: unknown.
        clock: Returns seconds. The launch begins with its first event.
    """

    def __init__(self, before: Mapping[str, float] | None, clock: Callable[[], float]) -> None:
        self._before, self._clock = before, clock
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = STARTING, clock()

    def saw(self, record: Mapping[str, Any]) -> None:
        """Take note of one event, or of one line about a step or an evaluation."""
        match record.get("event"):
            case events.RUN_STARTED:
                self._since = self._clock()
                if record.get("resumed") and not self._before:
                    self._before = None  # earlier launches left their files on another machine
            case events.EVALUATION:
                self._evaluated(record.get("seconds"))
            case events.TRAINING_STARTED:
                self._begin(TRAINING)
            case events.TRAINING_FINISHED | events.BUDGET_SPENT:
                self._begin(ENDING)
            case events.GENERATION_ENDED:
                self._begin(ENDING if record.get("class") in _LEFT_FOR_GOOD else RESTARTING)
            case _:
                pass

    def of_launch(self) -> Parts:
        """Return the parts of this launch so far, to the millisecond."""
        parts = {**self._parts, self._part: self._parts[self._part] + self._clock() - self._since}
        return {name: round(seconds, 3) for name, seconds in parts.items()}

    def of_run(self) -> Parts | None:
        """Return the parts of all launches so far; None if those of earlier launches are unknown."""
        if self._before is None:
            return None
        return {
            name: round(seconds + self._before.get(name, 0.0), 3)
            for name, seconds in self.of_launch().items()
        }

    def figures(self) -> dict[str, Any]:
        """Return fields for an event at the launch's end: `seconds` is the sum of `durations`."""
        parts = self.of_launch()
        return {
            "seconds": round(sum(parts.values()), 3),
            "durations": parts,
            "run_durations": self.of_run(),
        }

    def _begin(self, part: str) -> None:
        now = self._clock()
        self._parts[self._part] += now - self._since
        self._part, self._since = part, now

    def _evaluated(self, seconds: object) -> None:
        """Count the last *seconds*, which have counted as training, as evaluating."""
        self._begin(self._part)
        if isinstance(seconds, int | float):
            moved = min(max(0.0, float(seconds)), self._parts[TRAINING])
            self._parts[TRAINING] -= moved
            self._parts[EVALUATING] += moved


def read_parts(record: object) -> Parts | None:
    """Return the parts that *record*, from a state file, holds; None if it is something else."""
    if not isinstance(record, dict):
        return None
    parts = {name: record.get(name) for name in PARTS}
    if not all(isinstance(seconds, int | float) and seconds >= 0 for seconds in parts.values()):
        return None
    return {name: float(seconds or 0.0) for name, seconds in parts.items()}
