"""A learning-rate schedule that goes by a metric of the evaluations, such as ReduceLROnPlateau."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import StateError
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_COUNT = "epoch"  # the parameter of torch's schedules that count, in place of a metric


class _Evaluated(NamedTuple):
    """A position in training, as far as an interval needs it."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


class MetricSchedule:
    """Steps a schedule with a metric, after each evaluation that measures it.

    All ranks have the same metrics, so they agree without a message. An evaluation that is due by the end of training alone
    is left out: a run that is made longer later makes the steps of a run that was as long from the beginning.

    Args:
        metric: Name of the metric as evaluation lines have it: `loss`, `val.loss`.

    Attributes:
        optimizer: Optimizer whose rates the schedule sets; None if the schedule does not name it.

    Raises:
        StateError: `step()` of the schedule takes no metric.
    """

    def __init__(self, schedule: Any, metric: str, every: tuple[str, ...]) -> None:
        _require_metric(schedule)
        self._schedule, self._metric, self._due = schedule, metric, Due(every)
        self._last = _Evaluated()
        self._worker: Worker | None = None
        self.optimizer: Optimizer | None = getattr(schedule, "optimizer", None)

    def follow(self, worker: Worker) -> None:
        """Step the schedule after each evaluation from now on. Every rank."""
        self._worker = worker
        worker.moments.evaluation.append(self.after_evaluation)

    def after_evaluation(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """Step the schedule with its metric if the evaluation after *position* measured it. Every rank.

        StopTraining raised by the job's own schedule ends training on all ranks.
        """
        assert self._worker is not None
        if self._metric not in metrics or not self._due.is_due(self._last, position):
            return
        self._last = _Evaluated(position.step, position.epoch, position.samples)
        with self._worker.stoppable:
            self._schedule.step(metrics[self._metric])

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, and the position of the last evaluation that it was stepped after."""
        return {"schedule": self._schedule.state_dict(), "last": self._last._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._schedule.load_state_dict(state["schedule"])
        self._last = _Evaluated(**state["last"])


def step_of(schedule: Any, name: str, remedy: str) -> tuple[str, list[inspect.Parameter] | None]:
    """Return the class of a schedule, and the parameters of its `step()`; None: they are unknown.

    Raises:
        StateError: it has no `step()`.
    """
    kind = f"{type(schedule).__module__}.{type(schedule).__qualname__}"
    step = getattr(schedule, "step", None)
    if not callable(step):
        raise StateError(f"{name} is a {kind}, which has no step()", remedy)
    try:
        return kind, list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return kind, None


def _require_metric(schedule: Any) -> None:
    kind, parameters = step_of(schedule, "scheduler", "return one schedule")
    if parameters is None:
        return
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY or parameters[0].name == _COUNT:
        raise StateError(
            f"lr_scheduler.metric is given, and step() of the {kind} takes no metric",
            "name torch.optim.lr_scheduler:ReduceLROnPlateau, or a schedule of yours with step(metric); "
            'a schedule that counts has interval = "step" or "epoch"',
        )
