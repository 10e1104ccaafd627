"""`--deep` measures the metrics of an evaluation set on one batch, as an evaluation would: of one forward."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.runtime.deep.report import BrokenError
from elasticflow.runtime.deep.state import moves_optimizers
from elasticflow.runtime.evaluation.metric import OverSet, metric_of, number, of_loss
from elasticflow.runtime.evaluation.packing import packed, unpacked
from elasticflow.runtime.evaluation.recorder import Listener
from elasticflow.runtime.training.precision import autocast

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from elasticflow.protocol.deep_messages import DeepJob, EvaluationSet
    from elasticflow.runtime.deep.report import Report
    from elasticflow.runtime.evaluation.metric import Metric

_CPU = torch.device("cpu")
# What is tried where a metric follows from the mean loss.
_A_LOSS = 1.0
_SAMPLES = 2


def measure(
    report: Report,
    code: ModuleType,
    job: DeepJob,
    model: nn.Module,
    numbered: tuple[int, EvaluationSet],
    batch: Any,
) -> None:
    """Measure each metric of a set on one batch; what raises is reported.

    Args:
        report: Where problems go.
        code: The job's train.py as a module.
        job: The job.
        model: What is measured; in training mode afterwards.
        numbered: The set, and its number.
        batch: Of its data.
    """
    place, of_set = numbered
    entries = {name: getattr(code, f"metric_{place}_{name}") for name in of_set.metrics}
    model.eval()
    forward: list[tuple[Any, Any]] = []

    def outputs() -> tuple[Any, Any]:
        if not forward:
            forward.append(_outputs(code, job, model, batch))
        return forward[0]

    for name, make in entries.items():
        key = f"{of_set.key}.metrics.{name}"
        with suppress(BrokenError), torch.no_grad():
            metric = metric_of(report.call("factory", key, f"making {name}", make))
            value = partial(_value, name, metric, outputs, None if job.model.loss else (model, batch))
            report.call("step", key, f"measuring {name}", value)
    model.train()


def _outputs(code: ModuleType, job: DeepJob, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return what the model returns for a batch, and what holds its targets."""
    with autocast(job.precision, _CPU):
        if job.model.loss:
            return model(batch[0]), batch[1]
        is_step = not moves_optimizers(code)
        with Listener(model) if is_step else nullcontext() as listener:
            if listener is None:
                return model, batch
            code.training_step(model, batch)
            return listener.outputs(), batch


def _value(name: str, metric: Metric, outputs: Any, given: tuple[Any, Any] | None) -> float:
    if metric.is_of_loss:
        return of_loss(name, metric, _A_LOSS)
    if not metric.is_of_set:
        arguments = metric.chosen(*outputs()) if given is None or metric.takes_outputs else given
        return number(name, metric.called()(*arguments))
    over_set = OverSet(name, metric, _SAMPLES)
    chosen, targets = unpacked(packed(metric.chosen(*outputs())))
    over_set.add(chosen, targets, _SAMPLES)
    return over_set.value()
