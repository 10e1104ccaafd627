"""Metrics over an evaluation set, every sample once, at any world size."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from elasticflow import events
from elasticflow.runtime.data.dataset import opened
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.data.order.permutation import Permutation
from elasticflow.runtime.data.sample_reader import EVALUATION, SampleReader
from elasticflow.runtime.evaluation import several
from elasticflow.runtime.evaluation.metric import (
    OverSet,
    metric_of,
    noting_arguments,
    number,
    of_loss,
    outputs_and_targets,
)
from elasticflow.runtime.evaluation.recorder import Listener, Recorder
from elasticflow.runtime.evaluation.source import source_of
from elasticflow.runtime.evaluation.whole_set import OfBatch, WholeSet
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.sharded_tensors import reshard, sharded_modules
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


class Evaluation:
    """Measures a model on one set when it is due, and remembers the best value.

    Args:
        model: The bare model: a forward through DDP would be a collective.
        training_step: Function that returns the loss; None if a step moves optimizers itself, so that no loss is measured.
        dataset: Result of `open_dataset`, or a dataset made from it.
        schedule: Schedule of training; an evaluation is always due at its end.
        precision: fp32, bf16 or fp16 (autocast).
        step: Function of (model, batch) that returns outputs and targets for the metrics, in place of *training_step*: no
            loss is measured.
        metrics: Metrics by name. A metric is a function (outputs, targets) -> mean over the batch, or of (model, batch) without
            *uses_loss*; a class with update(outputs, targets) and compute(); or a `Metric`.
        best: "max accuracy" or "min loss"; None remembers nothing. A value equal to the best one so far is a best one, too.
        best_of: Entry point of the metric that *best* names, as in the job file: "metrics:accuracy".
        collate: Function that makes a batch of a list of samples. None: torch's default_collate.
        uses_loss: training_step calls the model once on the inputs of (inputs, targets).
        average: Average of the model's weights. If given, it is evaluated, and `best` refers to its metrics.
        also_raw: Evaluate the model's own weights beside the average.
        samples: Most samples to evaluate: always the same samples, drawn from the set by its length alone. None: all.

    Attributes:
        weights: Weights whose metrics come first.
        best: Best value so far of the metric that *best* names.
        is_owed: The evaluation after the step resumed from was cut short because all ranks exited; it has to be made now.
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
        self._schedule, self._due, self._precision = schedule, Due(every), precision
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
        self._source = None if best is None else source_of((best_of or "").partition(" ")[0])
        self._stop_when = stop_when
        self.best: float | None = None
        self._last: Position | None = None
        self._measured: tuple[int, float] | None = None  # step and value of the metric that `best` names
        self._best_step: int | None = None  # in this launch
        self._last_time = time.monotonic()
        self.is_owed = self._has_looked = False
        if worker.rank == 0 and self._due.seconds is not None:
            worker.vote.when("evaluation", self.is_due_by_time)

    @property
    def measure(self) -> str | None:
        """Name of a snapshot's metric, for its manifest; None: no `best`."""
        return None if self.ranked_by is None else measure_of(self.ranked_by, self._source)

    def after_step(self, position: Position) -> None:
        """Evaluate if an evaluation is due after this step. Collective: every rank, after each step."""
        previous, self._last = self._last or self._worker.started_at or self._schedule.start, position
        by_time = self._worker.vote.evaluation
        if by_time or self._due.is_due(previous, position) or self._schedule.is_end(position):
            with mark("evaluation"):
                self.run(position)

    def is_due(self, previous: Position, position: Position) -> bool:
        """True if an evaluation is due between two positions."""
        return self._due.is_due(previous, position)

    def is_due_by_time(self) -> bool:
        """True if an evaluation is due by this rank's clock."""
        return self._due.is_due_by_time(time.monotonic() - self._last_time)

    def run_if_owed(self, position: Position) -> None:
        """Make the evaluation after the step resumed from, if it was cut short because all ranks exited. Collective."""
        if self.is_owed:
            self.run(position)
        several.recall_stop(self._worker, self._stop_when)

    def run(self, position: Position) -> dict[str, float]:
        """Return and log the metrics over the whole set. Collective: every rank.

        If the job's own code raised StopTraining on some rank, nothing is measured and `worker.stopped` is set. The same happens
        if some rank was asked to exit; then the evaluation is owed.
        """
        metrics = several.run_sets(
            self._worker, {"": self}, position, ranked=("", self), stop_when=self._stop_when
        )
        stopped = self._worker.stopped
        self.is_owed = metrics is None and stopped is not None and not stopped.is_end
        return metrics or {}

    def measured(self) -> several.Measured | None:
        """Return the metrics over the whole set; None if all ranks are to exit or to stop. Collective: every rank."""
        metrics = self._measured_of(self._model)
        raw = None if metrics is None or self._raw is None else self._measured_of(self._raw)
        self._last_time = time.monotonic()
        if metrics is None or (self._raw is not None and raw is None):
            return None
        return several.Measured(metrics, raw)

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
        rule = {} if self._stop_when is None else {"stop_when": self._stop_when.state_dict()}
        return {
            "best": self.best,
            "measured": self._measured,
            "owed": self.is_owed,
            "ranked_by": self.ranked_by,
            "source": self._source,
            "data": self.fingerprint,
            "weights": self.weights,
            "looked": self._has_looked,
            **rule,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a snapshot's state; without its best value if another evaluation measured that value (event)."""
        state = several.of_one(state)
        if self._stop_when is not None:
            self._stop_when.load_state_dict(state.get("stop_when", {}))
        self.is_owed = state.get("owed", False)  # older snapshots do not say it
        self._has_looked = state.get("looked", True)
        # Older snapshots do not say what ranked them: it is taken to be what ranks now. They never measured an average.
        ranked_by, data = state.get("ranked_by") or self.ranked_by, state.get("data") or self.fingerprint
        weights, source = state.get("weights", "raw"), state.get("source")
        is_the_same = (ranked_by, weights) == (self.ranked_by, self.weights)
        is_the_same = is_the_same and str(data) == str(self.fingerprint)
        is_the_same = is_the_same and (None in (source, self._source) or source == self._source)
        best, measured = (state["best"], state["measured"]) if is_the_same else (None, None)
        self.best = best
        self._measured = None if measured is None else (int(measured[0]), float(measured[1]))
        is_lost = not is_the_same and state["best"] is not None
        if is_lost and self.best_mode is not None and self._worker.rank == 0:
            now = {"ranked_by": self.ranked_by, "source": self._source, "data": self.fingerprint}
            before = {"ranked_by": ranked_by, "source": source, "data": data}
            now, before = {**now, "weights": self.weights}, {**before, "weights": weights}
            self._worker.event(events.BEST_RESET, best=state["best"], measured_by=before, now=now)

    def _measured_of(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics of *model* over the whole set; None as `WholeSet.run`. Collective."""
        model_buffers.make_equal(self._worker, model)  # rank 0's, as in a snapshot
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
        with Listener(model) if hears else nullcontext() as listener:

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
                    return self._of_batch(model, batch, count, listener)

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

    def _of_batch(self, model: nn.Module, batch: Any, count: int, listener: Listener | None) -> OfBatch:
        """Return the results of a batch, from a single forward if metrics are called with its outputs."""
        given: tuple[Any, Any] = model, batch  # to each metric that is not called with outputs
        forward = given
        loss: Any = torch.zeros(())
        if self._step is not None:
            given = forward = outputs_and_targets(self._step(model, batch))
        elif self._training_step is None:
            pass
        elif self._uses_loss:
            recorder = Recorder(model)
            loss = self._training_step(recorder, batch)  # type: ignore[arg-type]  # called like a model
            given = forward = recorder.outputs, batch[1]
        else:
            loss = self._training_step(model, batch)
            forward = given if listener is None else (listener.outputs(), batch)
        measured = []
        for name, metric in self._of_batches.items():
            arguments = metric.chosen(*forward) if metric.takes_outputs else given
            with noting_arguments(name, *arguments):
                measured.append(number(name, metric.called()(*arguments)) * count)
        handed_over = [metric.chosen(*forward) for metric in self._of_set.values()]
        return OfBatch([*_loss_and_weight(loss, count), *measured], handed_over, count)


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
