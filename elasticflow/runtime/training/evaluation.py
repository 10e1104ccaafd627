"""Metrics over an evaluation set, every sample once, at any world size."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import operator
import textwrap
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow import events
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.dataset import opened
from elasticflow.runtime.data.sample_reader import EVALUATION, SampleReader
from elasticflow.runtime.model import model_buffers
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.process.votes import LEAVE
from elasticflow.runtime.training import loss_weights
from elasticflow.runtime.training.loss import parse_loss
from elasticflow.runtime.training.precision import AUTOCAST, autocast
from elasticflow.snapshots.format.manifest import measure_of
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position, Schedule

_LOSS = "loss"

Weights = Literal["ema", "raw"]
"""Which weights were measured: their average, or those that are trained."""


class Evaluation:
    """Measures a model when it is due and remembers the best value.

    Args:
        worker: This worker.
        model: The bare model: a forward through DDP would be a collective.
        training_step: Gives the loss; None where a step moves optimizers, and no loss is measured.
        dataset: What `open_dataset` returned, or what was made of it.
        schedule: Its end is always due.
        precision: fp32, bf16 or fp16 (autocast).
        every: Intervals, any of which makes an evaluation due.
        metrics: Name to callable: (outputs, targets) -> mean over the batch, or (model, batch) without uses_loss.
        best: "max accuracy" or "min loss"; None remembers nothing. A value equal to the best one so far is a best one, too.
        best_of: What measures the value that *best* names, as the job file has it: "metrics:accuracy".
        batch_size: Samples per forward.
        collate: Makes a batch of a list of samples; None for torch's.
        uses_loss: training_step calls the model once on the inputs of (inputs, targets).
        average: The average of the model's weights, which is measured then, and which `best` is of.
        also_raw: The model's own weights are measured beside the average's.

    Attributes:
        fingerprint: Of the dataset, if it has one.
        best: Best value so far of the metric that *best* names.
        is_owed: The one after the step gone on from was cut short, since all ranks left: it is to be made now.
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
        every: tuple[str, ...] = ("1 epoch",),
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        best: str | None = None,
        best_of: str | None = None,
        batch_size: int = 256,
        collate: Callable[[list[Any]], Any] | None = None,
        uses_loss: bool = True,
        average: AveragedModel | None = None,
        also_raw: bool = False,
    ) -> None:
        self._worker, self._training_step = worker, training_step
        self._model = model if average is None else average.module
        self._weights: Weights = "raw" if average is None else "ema"
        self._raw = model if also_raw and average is not None else None
        data = opened(dataset)
        self._content, self.fingerprint = data.content, data.fingerprint
        self._schedule, self._due, self._precision = schedule, Due(every), precision
        self._metrics = dict(metrics or {})
        mode, _, self._best_name = (best or "").partition(" ")
        self.best_mode: Literal["max", "min"] | None = {"max": "max", "min": "min"}.get(mode)  # type: ignore[assignment]
        self._batch_size, self._uses_loss = batch_size, uses_loss
        self._reader = SampleReader(
            self._content, collate, worker.seed, use=EVALUATION, generators=worker.generators
        )
        # What a best value is the best of. Values of another metric, on other data or of other weights cannot be
        # compared with it.
        of_average = "" if average is None else " of ema"
        self.ranked_by = None if best is None else f"{best} by {best_of}{of_average}"
        self._source = None if best is None else _source_of(best_of)
        self.best: float | None = None
        self._last: Position | None = None
        self._measured: tuple[int, float] | None = None  # step and value of the metric that `best` names
        self._last_time = time.monotonic()
        self.is_owed = self._has_looked = False
        if worker.rank == 0 and self._due.seconds is not None:
            worker.vote.evaluation_wanted = lambda: self._due.is_due_by_time(
                time.monotonic() - self._last_time
            )

    @property
    def measure(self) -> str | None:
        """What a snapshot's metric is, for its manifest; None: `best` names none."""
        return None if self.ranked_by is None else measure_of(self.ranked_by, self._source)

    def after_step(self, position: Position) -> None:
        """Evaluate if an evaluation is due after this step. Collective: every rank, after each step."""
        previous, self._last = self._last or self._worker.started_at or self._schedule.start, position
        by_time = self._worker.vote.evaluation
        if by_time or self._due.is_due(previous, position) or self._schedule.is_end(position):
            self.run(position)

    def run_if_owed(self, position: Position) -> None:
        """Make the evaluation after the step gone on from, if it was cut short because all ranks left. Collective."""
        if self.is_owed:
            self.run(position)

    def run(self, position: Position) -> dict[str, float]:
        """Return and log the metrics over the whole set. Collective: every rank.

        Nothing is measured, and `worker.stopped` set, if the job's own code raised StopTraining on some rank. So it is if
        some rank was asked to leave; then the evaluation is owed.
        """
        worker, began, since = self._worker, time.time(), time.monotonic()
        phase = worker.heartbeat.phase("evaluate")
        worker.generators.look()  # before this evaluation draws from them
        metrics = self._measured_of(self._model)
        raw = None if metrics is None or self._raw is None else self._measured_of(self._raw)
        if metrics is None or (self._raw is not None and raw is None):
            worker.agree_to_stop()
            assert worker.stopped is not None
            self.is_owed = not worker.stopped.is_end
            metrics = {}
        else:
            self.is_owed = False
            self._remember(position, metrics)
            if worker.rank == 0:
                beside: dict[str, dict[str, float]] = {} if raw is None else {"eval_raw": raw}
                worker.event(
                    events.EVALUATION,
                    epoch=position.epoch,
                    in_epoch=position.in_epoch,
                    eval=metrics,
                    weights=self._weights,
                    **beside,
                    best=self.best,
                    time=round(began, 3),
                    seconds=round(time.monotonic() - since, 6),
                )
        self._last_time = time.monotonic()
        worker.generators.rest()  # what an evaluation draws is no step's business
        worker.heartbeat.phase(phase)
        for action in worker.after_evaluation if metrics else ():
            action(position, metrics)
        worker.progress.go_on()
        return metrics

    def metric_at(self, position: Position) -> float | None:
        """Return the value of the metric that `best` names, if it was measured after exactly this step."""
        if self._measured is None or self._measured[0] != position.step:
            return None
        return self._measured[1]

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot keeps."""
        return {
            "best": self.best,
            "measured": self._measured,
            "owed": self.is_owed,
            "ranked_by": self.ranked_by,
            "source": self._source,
            "data": self.fingerprint,
            "weights": self._weights,
            "looked": self._has_looked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a snapshot kept; not the best value if another evaluation measured it (event)."""
        self.is_owed = state.get("owed", False)  # older snapshots do not say it
        self._has_looked = state.get("looked", True)
        # Older snapshots do not say what ranked them: it is taken to be what ranks now. They never measured an average.
        ranked_by, data = state.get("ranked_by") or self.ranked_by, state.get("data") or self.fingerprint
        weights, source = state.get("weights", "raw"), state.get("source")
        is_the_same = (ranked_by, data, weights) == (self.ranked_by, self.fingerprint, self._weights)
        is_the_same = is_the_same and (None in (source, self._source) or source == self._source)
        best, measured = (state["best"], state["measured"]) if is_the_same else (None, None)
        self.best = best
        self._measured = None if measured is None else (int(measured[0]), float(measured[1]))
        is_lost = not is_the_same and state["best"] is not None
        if is_lost and self.best_mode is not None and self._worker.rank == 0:
            now = {"ranked_by": self.ranked_by, "source": self._source, "data": self.fingerprint}
            before = {"ranked_by": ranked_by, "source": source, "data": data}
            now, before = {**now, "weights": self._weights}, {**before, "weights": weights}
            self._worker.event(events.BEST_RESET, best=state["best"], measured_by=before, now=now)

    def _measured_of(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics of *model* over the whole set; None as `_sums`. Collective."""
        model_buffers.make_equal(self._worker, model)  # rank 0's, as in a snapshot
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                sums = self._sums(model)
        finally:
            model.train(was_training)
        if sums is None:
            return None
        loss, weight, *measured = sums.tolist()
        means = [value / len(self._content) for value in measured]
        metrics = dict(zip(self._metrics, means, strict=True))
        if self._training_step is None:
            return metrics
        return {_LOSS: loss / weight if weight else math.nan} | metrics

    def _sums(self, model: nn.Module) -> Tensor | None:
        """Return *model*'s sums over the set, added batch by batch: the same bits at every world size. Collective.

        They are the loss's, of what it is a mean over, and the metrics'.
        None, on every rank, if StopTraining was raised on some rank, or it was asked to leave.
        """
        worker = self._worker
        batches = -(-len(self._content) // self._batch_size)
        # The last row is not of a batch: it says whether this rank's part was cut short.
        rows = torch.zeros(batches + 1, 2 + len(self._metrics), dtype=torch.float64)
        rows[-1] = 1.0
        looks, self._has_looked = not self._has_looked, True
        with autocast(self._precision, worker.device), worker.stoppable:
            for number in range(*even_split(batches, worker.world_size, worker.rank)):
                if worker.vote.leave_wanted:
                    worker.vote.stop_wanted = worker.vote.stop_wanted or LEAVE
                    break
                batch, count = self._batch(number)
                if looks:
                    self._look(model, batch, count)
                    looks = False
                worker.generators.seed_model(random_streams.model_key(worker.seed, 0, 0, number))
                rows[number] = torch.tensor(self._measure(model, batch, count), dtype=torch.float64)
                worker.heartbeat.beat()
            else:
                rows[-1] = 0.0
        if worker.world_size > 1:
            dist.all_reduce(rows)  # each row is one rank's, and zeros of the others
        *of_batches, cut_short = rows
        if cut_short.any():
            return None
        total = torch.zeros_like(cut_short)
        for row in of_batches:
            total += row
        return total

    def _batch(self, number: int) -> tuple[Any, int]:
        begin = number * self._batch_size
        end = min(begin + self._batch_size, len(self._content))
        batch = self._reader.read(begin, list(range(begin, end)))
        return index_loader.to_device(batch, self._worker.device), end - begin

    def _look(self, model: nn.Module, batch: Any, count: int) -> None:
        """Warn once in a run if the loss depends on how a batch is cut; every rank that has a batch."""
        worker = self._worker
        # The job's step may be a collective of its own: all ranks call it as often, or none does.
        is_fair = len(self._content) // self._batch_size >= worker.world_size or worker.world_size == 1
        if is_fair and self._training_step is not None:
            difference = loss_weights.difference(
                worker, model, self._training_step, batch, count, AUTOCAST.get(self._precision)
            )
            if difference is not None:
                loss_weights.warn(worker, difference)

    def _measure(self, model: nn.Module, batch: Any, count: int) -> list[float]:
        given: tuple[Any, Any] = model, batch  # to each metric
        if self._training_step is None:
            loss: Any = torch.zeros(())
        elif self._uses_loss:
            recorder = _Recorder(model)
            loss = self._training_step(recorder, batch)  # type: ignore[arg-type]  # called like a model
            given = recorder.outputs, batch[1]
        else:
            loss = self._training_step(model, batch)
        measured = [float(metric(*given)) * count for metric in self._metrics.values()]
        return [*_loss_and_weight(loss, count), *measured]

    def _remember(self, position: Position, metrics: dict[str, float]) -> None:
        if self.best_mode is None:
            return
        value = metrics[self._best_name]
        self._measured = (position.step, value)
        better = max if self.best_mode == "max" else min
        if self.best is not None and not math.isnan(self.best):
            value = better(self.best, value)
        self.best = value


def _source_of(entry: str | None) -> str | None:
    """Return a digest of the code of a function of the job, without comments and layout; None if it cannot be read.

    What it calls is not looked at, and a package that is installed has a version.
    """
    module, _, attribute = (entry or "").partition(":")
    try:
        measure = inspect.unwrap(operator.attrgetter(attribute)(import_module(module)))
        if "site-packages" in inspect.getfile(measure):
            return None
        code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(measure))))
    except Exception:  # noqa: BLE001  # importing the job's code may raise anything; measuring raises it again
        return None
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class _Recorder:
    """The model, remembering its last outputs: metrics need no second forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs = self._model(*args, **kwargs)
        return self.outputs


def _loss_and_weight(result: Any, count: int) -> tuple[float, float]:
    """Return the sum of the losses over a batch of *count* samples, and of what they are: samples or the step's own."""
    loss, weight = parse_loss(result)
    if loss is None:
        return 0.0, 0.0
    return (float(loss) * count, count) if weight is None else (float(loss), weight)
