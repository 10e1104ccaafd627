"""`train.stop_when`: the metrics of evaluations end training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


class StopWhen:
    """Ends training by a metric: once it is beyond a bound, or has not become better for a number of evaluations.

    Every rank has its own, and all take in the same numbers: they agree without a word.

    Args:
        metric: As evaluation lines have it: `loss`, `val.loss`.
        better: Whether a smaller or a larger value is better; of a bound, on which side of it training ends.
        evaluations: Evaluations in a row that were not better than the best one before them; or
        by: Better means by more than this.
    """

    def __init__(
        self,
        metric: str,
        better: Literal["min", "max"],
        *,
        evaluations: int | None = None,
        bound: float | None = None,
        by: float = 0.0,
    ) -> None:
        self._metric, self._sign = metric, 1.0 if better == "max" else -1.0
        self._evaluations, self._bound, self._by = evaluations, bound, by
        self._best: float | None = None
        self._best_step = self._since = 0
        self._last: float | None = None

    def take(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in the metrics of an evaluation after *step*."""
        value = metrics.get(self._metric)
        if value is None:
            return
        self._last = value
        if self._best is None or math.isnan(self._best) or self._sign * (value - self._best) > self._by:
            is_first = self._best is None
            self._best, self._best_step = value, step
            self._since = 0 if is_first or not math.isnan(value) else self._since + 1
        else:
            self._since += 1

    @property
    def reason(self) -> str | None:
        """Why training ends; None: it continues."""
        if self._last is None:
            return None
        if self._bound is not None:
            if not self._sign * (self._last - self._bound) > 0:
                return None
            side = "above" if self._sign > 0 else "below"
            return f"train.stop_when: {self._metric} is {self._last:.6g}, {side} {self._bound:g}"
        assert self._evaluations is not None
        if self._since < self._evaluations:
            return None
        assert self._best is not None
        best = f"the best is {self._best:.6g}, of step {self._best_step}"
        if math.isnan(self._best):
            best = "it was nan each time"
        return f"train.stop_when: {self._metric} was not better for {self._since} evaluations: {best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {
            "metric": self._metric,
            "better": "max" if self._sign > 0 else "min",
            "best": self._best,
            "best_step": self._best_step,
            "since": self._since,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot's state; from the beginning if that state is of another metric."""
        if (state.get("metric"), state.get("better")) != (self._metric, "max" if self._sign > 0 else "min"):
            return
        self._best, self._last = state["best"], state["last"]
        self._best_step, self._since = int(state["best_step"]), int(state["since"])
