"""Several evaluation sets: each is measured when it is due, and what is due after one step makes one line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from elasticflow import events
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process.stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.evaluation.stop_when import StopWhen
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position, Schedule


class Measured(NamedTuple):
    """Result of one evaluation of one set.

    Attributes:
        metrics: Metrics of the weights that the set names first.
        raw: Metrics of the raw weights, measured beside the average's; None: not requested.
    """

    metrics: dict[str, float]
    raw: dict[str, float] | None


class OneSet(Protocol):
    """One evaluation set: an `Evaluation`."""

    weights: Literal["ema", "raw"]
    best: float | None
    fingerprint: str | None

    @property
    def best_mode(self) -> Literal["max", "min"] | None:
        """Direction of the metric that `best` names; None: no `best`."""

    @property
    def best_name(self) -> str:
        """Name of that metric; empty: no `best`."""

    @property
    def measure(self) -> str | None:
        """Name of a snapshot's metric."""

    def measured(self) -> Measured | None:
        """Return the metrics over the whole set. Collective."""

    def remember(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Remember the value of the metric that `best` names."""

    def is_due(self, previous: Position, position: Position) -> bool:
        """True if it is due by what was done between two positions."""

    def is_due_by_time(self) -> bool:
        """True if it is due by this rank's clock."""

    def metric_at(self, position: Position) -> float | None:
        """Return the value of that metric, if it was measured after exactly this step."""

    def found_best_at(self, position: Position) -> bool:
        """Return True if the evaluation after exactly this step measured a better value than all before it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a snapshot kept."""


def run_sets(
    worker: Worker,
    sets: Mapping[str, OneSet],
    position: Position,
    *,
    ranked: tuple[str, OneSet] | None,
    stop_when: StopWhen | None,
) -> dict[str, float] | None:
    """Return and log the metrics over all of these sets, under their names: `val.loss`. Collective: every rank.

    If the job's own code raised StopTraining on some rank, or some rank was asked to exit, nothing is measured and
    `worker.stopped` is set. `worker.stopped` is also set if *stop_when* says that training ends.

    Args:
        sets: Evaluation sets by name; metrics of a set with an empty name have no prefix.
        ranked: The set whose best value the log line shows, with its name.
        stop_when: Receives the metrics.
    """
    began, since = time.time(), time.monotonic()
    phase = worker.heartbeat.phase("evaluate")
    worker.progress.flush()  # whoever looks on sees all steps before it, however long it takes
    worker.generators.look()  # before this evaluation draws from them
    measured = _measured(sets)
    metrics: dict[str, float] | None = None
    if measured is None:
        worker.agree_to_stop()
        assert worker.stopped is not None
    else:
        metrics = _named({name: each.metrics for name, each in measured.items()})
        for name, each in measured.items():
            sets[name].remember(position, each.metrics)
        raw = _named({name: each.raw for name, each in measured.items() if each.raw is not None})
        beside: dict[str, Any] = {"eval_raw": raw} if raw else {}
        if ranked is not None and ranked[1].best_name:
            beside |= {"best_of": _name_of(ranked[0], ranked[1].best_name)}
        if worker.rank == 0:
            worker.event(
                events.EVALUATION,
                epoch=position.epoch,
                in_epoch=position.in_epoch,
                eval=metrics,
                weights=_weights(sets),
                **beside,
                best=None if ranked is None else ranked[1].best,
                time=round(began, 3),
                seconds=round(time.monotonic() - since, 6),
            )
        if stop_when is not None:
            stop_when.take(metrics, position.step)
            if (reason := stop_when.reason) is not None:
                worker.stopped = Stopped(reason, None)
    worker.generators.rest()  # what an evaluation draws is no step's business
    worker.heartbeat.phase(phase)
    for action in worker.moments.evaluation if metrics else ():
        action(position, metrics or {})
    worker.progress.go_on()
    return metrics


def recall_stop(worker: Worker, stop_when: StopWhen | None) -> None:
    """Have a run that *stop_when* has ended end again before the next step, unless it says otherwise by now; rank 0 requests it."""
    if stop_when is not None and worker.rank == 0 and (reason := stop_when.reason) is not None:
        worker.vote.stop_wanted, worker.vote.stop_is_by_rule = reason, True


def _measured(sets: Mapping[str, OneSet]) -> dict[str, Measured] | None:
    """Return what all of the sets measured; None if one of them was cut short."""
    measured: dict[str, Measured] = {}
    for name, each in sets.items():
        result = each.measured()
        if result is None:
            return None
        measured[name] = result
    return measured


def _named(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {_name_of(name, key): value for name, each in metrics.items() for key, value in each.items()}


def _name_of(of_set: str, metric: str) -> str:
    return f"{of_set}.{metric}" if of_set else metric


def _weights(sets: Mapping[str, OneSet]) -> str | dict[str, str]:
    """Return which weights were measured: one word, or one per set."""
    by_set = {name: each.weights for name, each in sets.items()}
    return next(iter(by_set.values())) if len(set(by_set.values())) == 1 else dict(by_set)


class Evaluations:
    """Measures a model on several sets, each when it is due.

    Args:
        schedule: Schedule of training; each set is due at its end.
        sets: Evaluation sets by name; at most one of them has a `best`.

    Attributes:
        is_owed: Some were cut short after the step resumed from, since all ranks left: they are to be made now.
    """

    def __init__(
        self,
        worker: Worker,
        schedule: Schedule,
        sets: Mapping[str, OneSet],
        *,
        stop_when: StopWhen | None = None,
    ) -> None:
        self._worker, self._schedule, self._sets, self._stop_when = worker, schedule, dict(sets), stop_when
        self._first = next(iter(self._sets.values()))
        # The set that has a `best`, with its name.
        self._named_ranked = next(
            ((name, each) for name, each in self._sets.items() if each.best_mode is not None), None
        )
        self._ranked = None if self._named_ranked is None else self._named_ranked[1]
        self._owed: list[str] = []
        self._last: Position | None = None
        if worker.rank == 0:  # each set wrote its own over the one before
            worker.vote.when("evaluation", lambda: any(each.is_due_by_time() for each in self._sets.values()))

    @property
    def is_owed(self) -> bool:
        """True if some sets were cut short after the step resumed from."""
        return bool(self._owed)

    @property
    def best(self) -> float | None:
        """The best value so far of the metric that one set's `best` names."""
        return None if self._ranked is None else self._ranked.best

    @property
    def best_mode(self) -> Literal["max", "min"] | None:
        """Direction of that metric."""
        return None if self._ranked is None else self._ranked.best_mode

    @property
    def measure(self) -> str | None:
        """Name of a snapshot's metric, for its manifest; None: no set has a `best`."""
        return None if self._ranked is None else self._ranked.measure

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the data that snapshots are ranked by; of the first set where they are not."""
        return (self._ranked or self._first).fingerprint

    def after_step(self, position: Position) -> None:
        """Evaluate on the sets that are due after this step. Collective: every rank, after each step."""
        previous, self._last = self._last or self._worker.started_at or self._schedule.start, position
        is_end = self._schedule.is_end(position)
        due = [name for name, each in self._sets.items() if is_end or each.is_due(previous, position)]
        if self._worker.vote.evaluation and not is_end:
            due = [name for name in self._sets if name in {*due, *self._due_by_time()}]
        if due:
            with mark("evaluation"):
                self.run(position, due)

    def run_if_owed(self, position: Position) -> None:
        """Make the evaluation after the step resumed from, if it was cut short because all ranks exited. Collective."""
        if self._owed:
            self.run(position, [name for name in self._owed if name in self._sets] or list(self._sets))
        recall_stop(self._worker, self._stop_when)

    def run(self, position: Position, names: list[str]) -> dict[str, float]:
        """Return and log the metrics over the sets of these names; as `run_sets`. Collective: every rank."""
        sets = {name: self._sets[name] for name in names}
        metrics = run_sets(self._worker, sets, position, ranked=self._named_ranked, stop_when=self._stop_when)
        stopped = self._worker.stopped
        self._owed = names if metrics is None and stopped is not None and not stopped.is_end else []
        return metrics or {}

    def metric_at(self, position: Position) -> float | None:
        """Return the value of the metric that `best` names, if it was measured after exactly this step."""
        return None if self._ranked is None else self._ranked.metric_at(position)

    def found_best_at(self, position: Position) -> bool:
        """Return True if the evaluation after exactly this step measured a better value than all before it."""
        return self._ranked is not None and self._ranked.found_best_at(position)

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot keeps."""
        rule = {} if self._stop_when is None else {"stop_when": self._stop_when.state_dict()}
        return {
            "sets": {name: each.state_dict() for name, each in self._sets.items()},
            "owed": list(self._owed),
            "weights": (self._ranked or self._first).weights,
            **rule,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a snapshot's state into the sets of the same names; a single set's state goes to the set that ranks snapshots."""
        if self._stop_when is not None:
            self._stop_when.load_state_dict(state.get("stop_when", {}))
        if "sets" not in state:  # the job had one set without a name
            (self._ranked or self._first).load_state_dict(state)
            self._owed = list(self._sets) if state.get("owed", False) else []
            return
        self._owed = list(state["owed"])
        for name, each in self._sets.items():
            if name in state["sets"]:
                each.load_state_dict(state["sets"][name])

    def _due_by_time(self) -> set[str]:
        """Return the sets that are due by rank 0's clock. Collective: every rank, where the vote says that some are."""
        marks = torch.tensor([each.is_due_by_time() for each in self._sets.values()], dtype=torch.int32)
        if self._worker.world_size > 1:
            dist.broadcast(marks, 0)
        return {name for name, mark in zip(self._sets, marks.tolist(), strict=True) if mark}


def of_one(state: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot's state of several sets as that of a single one: of the set that ranks snapshots, or the first."""
    if "sets" not in state:
        return state
    states: list[dict[str, Any]] = list(state["sets"].values())
    one = next((each for each in states if each.get("ranked_by") is not None), states[0] if states else {})
    return {**one, "owed": bool(state["owed"]), "stop_when": state.get("stop_when", {})}
