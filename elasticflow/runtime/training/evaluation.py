"""Metrics over one evaluation set or several, every sample once, at any world size; what is due after one step makes one line."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import operator
import textwrap
import time
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from elasticflow import events
from elasticflow.runtime.data.dataset import opened
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.data.order.permutation import Permutation
from elasticflow.runtime.data.sample_reader import EVALUATION, SampleReader
from elasticflow.runtime.evaluation.metric import (
    OverSet,
    hearing,
    metric_of,
    noting_arguments,
    number,
    of_loss,
    outputs_and_targets,
)
from elasticflow.runtime.evaluation.whole_set import OfBatch, WholeSet
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.sharded_tensors import reshard, sharded_modules
from elasticflow.runtime.process.stopping import Stopped
from elasticflow.runtime.training import loss_weights, model_buffers
from elasticflow.runtime.training.loss import parse_loss, require_count
from elasticflow.runtime.training.modes import evaluating
from elasticflow.runtime.training.precision import AUTOCAST, autocast
from elasticflow.snapshots.format.manifest import measure_of
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.evaluation.metric import Metric
    from elasticflow.runtime.evaluation.stop_when import StopWhen
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position, Schedule

_LOSS = "loss"
_SHUFFLE = 0  # the seed by which a part of a set is chosen

Weights = Literal["ema", "raw"]
"""Which weights were measured: their average, or those that are trained."""


class Measured(NamedTuple):
    """Result of one evaluation of one set.

    Attributes:
        metrics: Metrics of the weights that the set names first.
        raw: Metrics of the raw weights, measured beside the average's; None: not requested.
    """

    metrics: dict[str, float]
    raw: dict[str, float] | None


class Evaluation:
    """Measures a model on one set, and remembers the best value; `Evaluations` calls it when it is due.

    Args:
        model: The bare model: a forward through DDP would be a collective.
        training_step: Function that returns the loss; None if a step moves optimizers itself, so that no loss is measured.
        dataset: Result of `open_dataset`, or a dataset made from it.
        step: Function of (model, batch) that returns outputs and targets for the metrics, in place of *training_step*: no
            loss is measured.
        metrics: Metrics by name. A metric is a function (outputs, targets) -> mean over the batch, or of (model, batch) without
            *uses_loss*; a class with update(outputs, targets) and compute(); or a `Metric`.
        best: "max accuracy" or "min loss"; None remembers nothing. A value equal to the best one so far is a best one, too.
        best_of: Entry point of the metric that *best* names, as in the job file: "metrics:accuracy".
        uses_loss: training_step calls the model once on the inputs of (inputs, targets).
        average: Average of the model's weights. If given, it is evaluated, and `best` refers to its metrics.
        stop_when: Ends training by the metrics, where this is the only set.

    Attributes:
        best: Best value so far of the metric that *best* names.
        due: The intervals at which the set is measured.
    """

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any], Any] | None,
        dataset: Any,
        schedule: Schedule,
        *,
        precision: str = "fp32",
        step: Callable[[nn.Module, Any], Any] | None = None,
        every: tuple[str, ...] = ("1 epoch",),
        metrics: Mapping[str, Callable[..., Any] | Metric] | None = None,
        best: str | None = None,
        best_of: str | None = None,
        batch_size: int = 256,
        collate: Callable[[list[Any]], Any] | None = None,
        uses_loss: bool = True,
        average: AveragedModel | None = None,
        also_raw: bool = False,
        samples: int | None = None,
        stop_when: StopWhen | None = None,
    ) -> None:
        self._worker, self._step = worker, step
        self._training_step = training_step if step is None else None
        self._model = model if average is None else average.module
        self.weights: Weights = "raw" if average is None else "ema"
        self._raw = model if also_raw and average is not None else None
        data = opened(dataset)
        self._content, self.fingerprint = data.content, data.fingerprint
        self._indices = _chosen(len(data.content), samples)
        self._schedule, self.due, self._precision = schedule, Due(every), precision
        self._metrics = {name: metric_of(entry) for name, entry in (metrics or {}).items()}
        rest = {name: metric for name, metric in self._metrics.items() if not metric.is_of_loss}
        self._of_set = {name: metric for name, metric in rest.items() if metric.is_of_set}
        self._of_batches = {name: metric for name, metric in rest.items() if not metric.is_of_set}
        self._takes_outputs = any(metric.takes_outputs for metric in rest.values())
        mode, _, self.best_name = (best or "").partition(" ")
        self.best_mode: Literal["max", "min"] | None = {"max": "max", "min": "min"}.get(mode)  # type: ignore[assignment]
        self._batch_size, self._uses_loss = batch_size, uses_loss
        self._reader = SampleReader(
            self._content, collate, worker.seed, use=EVALUATION, generators=worker.generators
        )
        # Identity of a best value. Values of another metric, on other data or of other weights cannot be
        # compared with it.
        of_average = "" if average is None else " of ema"
        of_part = "" if samples is None else f" of {samples} samples"
        self.ranked_by = None if best is None else f"{best} by {best_of}{of_average}{of_part}"
        # After a blank come arguments: they are data, no code.
        self._source = None if best is None else _source_of((best_of or "").partition(" ")[0])
        self._stop_when = stop_when
        self.best: float | None = None
        self._measured: tuple[int, float] | None = None  # step and value of the metric that `best` names
        self._best_step: int | None = None  # in this launch
        self._last_time = time.monotonic()
        self._has_looked = False

    def alone(self) -> Evaluations:
        """Return what evaluates on this set, the only one of a job, when it is due."""
        return Evaluations(self._worker, self._schedule, {"": self}, stop_when=self._stop_when)

    @property
    def measure(self) -> str | None:
        """Name of a snapshot's metric, for its manifest; None: no `best`."""
        return None if self.ranked_by is None else measure_of(self.ranked_by, self._source)

    def is_due_by_time(self) -> bool:
        """True if an evaluation is due by this rank's clock."""
        return self.due.is_due_by_time(time.monotonic() - self._last_time)

    def measured(self) -> Measured | None:
        """Return the metrics over the whole set; None if all ranks are to exit or to stop. Collective: every rank."""
        metrics = self._measured_of(self._model)
        raw = None if metrics is None or self._raw is None else self._measured_of(self._raw)
        self._last_time = time.monotonic()
        if metrics is None or (self._raw is not None and raw is None):
            return None
        return Measured(metrics, raw)

    def remember(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Remember the value of the metric that `best` names, measured after this step."""
        if self.best_mode is None:
            return
        value = metrics[self.best_name]
        self._measured = (position.step, value)
        if self.best is None or math.isnan(self.best):
            is_better = True
        else:
            is_better = value > self.best if self.best_mode == "max" else value < self.best
        if is_better:
            self.best = value
            self._best_step = None if math.isnan(value) else position.step

    def found_best_at(self, position: Position) -> bool:
        """Return True if the evaluation after exactly this step measured a better value than all before it."""
        return self._best_step == position.step

    def metric_at(self, position: Position) -> float | None:
        """Return the value of the metric that `best` names, if it was measured after exactly this step."""
        if self._measured is None or self._measured[0] != position.step:
            return None
        return self._measured[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {
            "best": self.best,
            "measured": self._measured,
            **self._measured_by,
            "looked": self._has_looked,
        }

    @property
    def _measured_by(self) -> dict[str, Any]:
        return {
            "ranked_by": self.ranked_by,
            "source": self._source,
            "data": self.fingerprint,
            "weights": self.weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a snapshot's state; without its best value if another evaluation measured that value (event)."""
        self._has_looked = state.get("looked", True)
        # Older snapshots do not say what ranked them: it is taken to be what ranks now. They never measured an average.
        ranked_by, data = state.get("ranked_by") or self.ranked_by, state.get("data") or self.fingerprint
        before = {
            "ranked_by": ranked_by,
            "source": state.get("source"),
            "data": data,
            "weights": state.get("weights", "raw"),
        }
        now = self._measured_by
        is_the_same = all(
            str(before[name]) == str(now[name]) or (name == "source" and None in (before[name], now[name]))
            for name in now
        )
        best, measured = (state["best"], state["measured"]) if is_the_same else (None, None)
        self.best = best
        self._measured = None if measured is None else (int(measured[0]), float(measured[1]))
        is_lost = not is_the_same and state["best"] is not None
        if is_lost and self.best_mode is not None and self._worker.rank == 0:
            self._worker.event(events.BEST_RESET, best=state["best"], measured_by=before, now=now)

    def _measured_of(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics of *model* over the whole set; None as `WholeSet.run`. Collective."""
        model_buffers.send(self._worker, list(model.buffers()))  # rank 0's, as in a snapshot
        with evaluating(model), torch.no_grad():
            measured = self._over_set(model)
        reshard(model)
        return measured

    def _over_set(self, model: nn.Module) -> dict[str, float] | None:
        samples = len(self._indices)
        batches = -(-samples // self._batch_size)
        of_set = [OverSet(n, m, samples, is_first=self._worker.rank == 0) for n, m in self._of_set.items()]
        in_step = bool(sharded_modules(model))
        hears = self._training_step is not None and not self._uses_loss and self._takes_outputs
        looks, self._has_looked = not self._has_looked and not in_step, True
        with hearing(model) if hears else nullcontext() as heard:

            def measure(number: int) -> OfBatch:
                nonlocal looks
                with autocast(self._precision, self._worker.device):
                    batch, count = self._batch(number)
                    if looks:
                        self._look(model, batch, count)
                        looks = False
                    self._worker.generators.seed_model(
                        random_streams.model_key(self._worker.seed, 0, 0, number)
                    )
                    return self._of_batch(model, batch, count, heard)

            whole_set = WholeSet(self._worker, batches, 2 + len(self._of_batches), of_set, in_step=in_step)
            result = whole_set.run(measure)
        if result is None:
            return None
        (loss, weight, *sums), over_set = result[0].tolist(), result[1]
        loss = loss / weight if weight else math.nan
        metrics = {} if self._training_step is None else {_LOSS: loss}
        values = {
            **dict(zip(self._of_batches, (each / samples for each in sums), strict=True)),
            **dict(zip(self._of_set, over_set, strict=True)),
        }
        return metrics | {
            name: of_loss(name, metric, loss) if metric.is_of_loss else values[name]
            for name, metric in self._metrics.items()
        }

    def _batch(self, number: int) -> tuple[Any, int]:
        begin = number * self._batch_size
        end = min(begin + self._batch_size, len(self._indices))
        batch = self._reader.read(begin, list(self._indices[begin:end]))
        return transfer_to(self._worker.device).move(batch), end - begin

    def _look(self, model: nn.Module, batch: Any, count: int) -> None:
        """Warn once in a run if the loss depends on how a batch is cut; every rank that has a batch."""
        worker = self._worker
        # The job's step may be a collective of its own: all ranks call it as often, or none does.
        is_fair = len(self._indices) // self._batch_size >= worker.world_size or worker.world_size == 1
        if is_fair and self._training_step is not None:
            difference = loss_weights.difference(
                worker, model, self._training_step, batch, count, AUTOCAST.get(self._precision)
            )
            if difference is not None:
                loss_weights.warn(worker, difference)

    def _of_batch(self, model: nn.Module, batch: Any, count: int, heard: Callable[[], Any] | None) -> OfBatch:
        """Return the results of a batch, from a single forward if metrics are called with its outputs."""
        given: tuple[Any, Any] = model, batch  # to each metric that is not called with outputs
        forward = given
        loss: Any = torch.zeros(())
        if self._step is not None:
            given = forward = outputs_and_targets(self._step(model, batch))
        elif self._training_step is None:
            pass
        elif self._uses_loss:
            made: list[Any] = []

            def recorded(*args: Any, **kwargs: Any) -> Any:
                made[:] = [model(*args, **kwargs)]
                return made[0]

            loss = self._training_step(recorded, batch)  # type: ignore[arg-type]  # called like a model
            given = forward = made.pop(), batch[1]
        else:
            loss = self._training_step(model, batch)
            forward = given if heard is None else (heard(), batch)
        measured = []
        for name, metric in self._of_batches.items():
            arguments = metric.chosen(*forward) if metric.takes_outputs else given
            with noting_arguments(name, *arguments):
                measured.append(number(name, metric.called()(*arguments)) * count)
        handed_over = [metric.chosen(*forward) for metric in self._of_set.values()]
        return OfBatch([*_loss_and_weight(loss, count), *measured], handed_over, count)


class Evaluations:
    """Measures a model on one set or several, each when it is due.

    Args:
        schedule: Schedule of training; each set is due at its end.
        sets: Evaluation sets by name; at most one of them has a `best`. The only set of a job has an empty name.

    Attributes:
        ranking: The set that ranks snapshots: the one that has a `best`, else the first.
        is_owed: Some were cut short after the step resumed from, since all ranks left: they are to be made now.
    """

    def __init__(
        self,
        worker: Worker,
        schedule: Schedule,
        sets: Mapping[str, Evaluation],
        *,
        stop_when: StopWhen | None = None,
    ) -> None:
        self._worker, self._schedule, self._sets, self._stop_when = worker, schedule, dict(sets), stop_when
        self._ranking_name = next(
            (name for name, each in sets.items() if each.best_mode is not None), next(iter(sets))
        )
        self.ranking = self._sets[self._ranking_name]
        self._owed: list[str] = []
        self._last: Position | None = None
        if worker.rank == 0 and any(each.due.seconds is not None for each in sets.values()):
            worker.vote.when("evaluation", lambda: any(each.is_due_by_time() for each in self._sets.values()))

    @property
    def is_owed(self) -> bool:
        """True if some sets were cut short after the step resumed from."""
        return bool(self._owed)

    def after_step(self, position: Position) -> None:
        """Evaluate on the sets that are due after this step. Collective: every rank, after each step."""
        previous, self._last = self._last or self._worker.started_at or self._schedule.start, position
        is_end = self._schedule.is_end(position)
        due = [name for name, each in self._sets.items() if is_end or each.due.is_due(previous, position)]
        if self._worker.vote.evaluation and not is_end:
            due = [name for name in self._sets if name in {*due, *self._due_by_time()}]
        if due:
            with mark("evaluation"):
                self.run(position, due)

    def run_if_owed(self, position: Position) -> None:
        """Make the evaluation after the step resumed from, if it was cut short because all ranks exited. Collective.

        A run that *stop_when* has ended ends again before the next step, unless the rule says otherwise by now; rank 0 requests it.
        """
        if self._owed:
            self.run(position, [name for name in self._owed if name in self._sets] or None)
        if (
            self._stop_when is not None
            and self._worker.rank == 0
            and (reason := self._stop_when.reason) is not None
        ):
            self._worker.vote.stop_wanted, self._worker.vote.stop_is_by_rule = reason, True

    def run(self, position: Position, names: list[str] | None = None) -> dict[str, float]:
        """Return and log the metrics over the sets of these names, or of all; as `run_sets`. Collective: every rank."""
        sets = {name: each for name, each in self._sets.items() if names is None or name in names}
        ranked = self._ranking_name, self.ranking
        metrics = run_sets(self._worker, sets, position, ranked=ranked, stop_when=self._stop_when)
        stopped = self._worker.stopped
        self._owed = list(sets) if metrics is None and stopped is not None and not stopped.is_end else []
        return metrics or {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot keeps."""
        rule = {} if self._stop_when is None else {"stop_when": self._stop_when.state_dict()}
        return {
            "sets": {name: each.state_dict() for name, each in self._sets.items()},
            "owed": list(self._owed),
            "weights": self.ranking.weights,
            **rule,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a snapshot's state into the sets of the same names; where either has one set alone, into the set that ranks snapshots."""
        if self._stop_when is not None:
            self._stop_when.load_state_dict(state.get("stop_when", {}))
        # Older snapshots have the state of the only set by itself.
        states, owed = state.get("sets", {"": state}), state.get("owed", False)
        self._owed = list(owed) if isinstance(owed, list) else [""] * owed
        if ("" in states) != ("" in self._sets):
            ranking = next((each for each in states.values() if each.get("ranked_by") is not None), None)
            states = {self._ranking_name: ranking or next(iter(states.values()))}
        for name in self._sets.keys() & states.keys():
            self._sets[name].load_state_dict(states[name])

    def _due_by_time(self) -> set[str]:
        """Return the sets that are due by rank 0's clock. Collective: every rank, where the vote says that some are."""
        marks = torch.tensor([each.is_due_by_time() for each in self._sets.values()], dtype=torch.int32)
        if self._worker.world_size > 1:
            dist.broadcast(marks, 0)
        return {name for name, mark in zip(self._sets, marks.tolist(), strict=True) if mark}


def run_sets(
    worker: Worker,
    sets: Mapping[str, Evaluation],
    position: Position,
    *,
    ranked: tuple[str, Evaluation] | None,
    stop_when: StopWhen | None,
) -> dict[str, float] | None:
    """Return and log the metrics over all of these sets, under their names: `val.loss`. Collective: every rank.

    If the job's own code raised StopTraining on some rank, or some rank was asked to exit, nothing is measured and
    `worker.stopped` is set. `worker.stopped` is also set if *stop_when* says that training ends.

    Args:
        sets: Evaluation sets by name; metrics of a set with an empty name have no prefix.
        ranked: The set whose best value the log line shows, with its name.
    """
    began, since = time.time(), time.monotonic()
    phase = worker.heartbeat.phase("evaluate")
    worker.progress.flush()  # whoever looks on sees all steps before it, however long it takes
    worker.generators.look()  # before this evaluation draws from them
    measured = _all_measured(sets)
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


def _all_measured(sets: Mapping[str, Evaluation]) -> dict[str, Measured] | None:
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


def _weights(sets: Mapping[str, Evaluation]) -> str | dict[str, str]:
    """Return which weights were measured: one word, or one per set."""
    by_set = {name: each.weights for name, each in sets.items()}
    return next(iter(by_set.values())) if len(set(by_set.values())) == 1 else dict(by_set)


def _chosen(length: int, samples: int | None) -> Sequence[int]:
    """Return the indices of the samples that are measured, in ascending order.

    Of a part it is the beginning of a fixed shuffle: the same whatever the job's seed is, and of a larger part another part.
    """
    if samples is None or samples >= length:
        return range(length)
    return sorted(Permutation(length, _SHUFFLE, 0)(np.arange(samples)).tolist())


def _loss_and_weight(result: Any, count: int) -> tuple[float, float]:
    """Return the sum of the losses over a batch of *count* samples, and of what they are: samples or the step's own."""
    loss, weight = parse_loss(result)
    if loss is None:
        return 0.0, 0.0
    if weight is None:
        return float(loss) * count, count
    number = float(weight)
    require_count(number, "an evaluation")
    return float(loss), number


def _source_of(entry: str) -> str | None:
    """Return a digest of the code of a function of the job, without comments and layout; None if it cannot be read.

    What it calls is not looked at, and a package that is installed has a version.
    """
    module, _, attribute = entry.partition(":")
    try:
        measure = inspect.unwrap(operator.attrgetter(attribute)(import_module(module)))
        if "site-packages" in inspect.getfile(measure):
            return None
        code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(measure))))
    except Exception:  # noqa: BLE001  # importing the job's code may raise anything; measuring raises it again
        return None
    return hashlib.sha256(code.encode()).hexdigest()[:16]
