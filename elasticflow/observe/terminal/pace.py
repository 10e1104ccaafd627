"""The speed of training and the time left; steps and evaluations are timed separately."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from elasticflow.system.records import float_of, int_of

if TYPE_CHECKING:
    from elasticflow.system.records import Record

# Speed is the mean over this much training: long enough to be steady, short enough to notice a change.
OVER_S = 8.0
# The first steps of a group warm up: the time left is unknown until so many are timed, or for so long.
_LEAST_STEPS, _LEAST_S = 10, 1.0
# The time of an evaluation is the mean over this many.
_EVALUATIONS = 5


class Pace:
    """The speed of a run, from its records of metrics.jsonl, oldest first; a step back begins a new measurement.

    Only the steps' own `seconds` count, without evaluations and starts, so that the time left is steady.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque()  # step, samples, seconds since the step before
        self._timed = 0.0  # the sum over all steps but the first
        self._generation: object = None
        self._evaluations: deque[float] = deque(maxlen=_EVALUATIONS)  # seconds of each evaluation
        # These count steps; the start of training counts as an evaluation.
        self._evaluated: deque[int] = deque([0], maxlen=2)

    def add(self, record: Record) -> None:
        """Add a record of a step or an evaluation."""
        step = int_of(record, "step")
        if record.get("eval") is not None:
            if step > self._evaluated[-1]:
                self._evaluated.append(step)
            if (seconds := float_of(record, "seconds")) is not None:
                self._evaluations.append(seconds)
            return
        seconds = float_of(record, "seconds")
        if not self._steps or step <= self._steps[-1][0] or record.get("generation") != self._generation:
            self.clear()  # the first step of a group is not typical: it includes work that is done once
            self._generation, seconds = record.get("generation"), 0.0
        if seconds is None or seconds < 0:
            return
        timed = seconds * (step - self._steps[-1][0]) if self._steps else 0.0
        self._steps.append((step, int_of(record, "samples"), timed))
        self._timed += timed
        while len(self._steps) > 2 and self._timed - self._steps[1][2] >= OVER_S:
            self._steps.popleft()
            self._timed -= self._steps[0][2]

    def clear(self) -> None:
        """Forget the steps, as when another group begins; the time of evaluations stays known."""
        self._steps.clear()
        self._timed = 0.0

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None until two steps are known."""
        steps = self._steps[-1][0] - self._steps[0][0] if self._steps else 0
        return self._timed / steps if steps and self._timed > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of training; None until two steps are known."""
        samples = self._steps[-1][1] - self._steps[0][1] if self._steps else 0
        return samples / self._timed if len(self._steps) > 1 and self._timed > 0 else None

    def seconds_left(self, step: int, steps: int) -> float | None:
        """Return the seconds for the steps after *step* up to *steps*, and for the evaluations among them and at the end.

        Time and interval of evaluations are known after the first one. None until enough steps are timed.
        """
        if self.step_s is None:
            return None
        if self._timed < _LEAST_S and self._steps[-1][0] - self._steps[0][0] < _LEAST_STEPS:
            return None
        return max(0, steps - step) * self.step_s + self._evaluations_left(step, steps) * self._evaluation_s

    @property
    def _evaluation_s(self) -> float:
        return sum(self._evaluations) / len(self._evaluations) if self._evaluations else 0.0

    def _evaluations_left(self, step: int, steps: int) -> int:
        last = self._evaluated[-1]
        every = last - self._evaluated[0]
        if not every or steps <= last:
            return 0
        # Evaluations keep the interval between the last two, and there is one at the end.
        return math.ceil((steps - max(last, step - every)) / every)
