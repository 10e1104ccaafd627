"""Measures the metrics of an evaluation set for `--deep` on one batch, by one forward pass as an evaluation does."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.child.run import CPU
from elasticflow.runtime.data.packing import packed, unpacked
from elasticflow.runtime.evaluation.metric import (
    OverSet,
    hearing,
    metric_of,
    noting_arguments,
    number,
    of_loss,
    outputs_and_targets,
)
from elasticflow.runtime.training.precision import autocast

if TYPE_CHECKING:
    from torch import nn

    from elasticflow.deep.child.entry_point import DataTable, EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.runtime.evaluation.metric import Metric

# A metric that follows from the mean loss is tried with this value.
_A_LOSS = 1.0
_SAMPLES = 2


def measure(report: Report, code: EntryPoint, model: nn.Module, table: DataTable, batch: Any) -> list[str]:
    """Measure each metric of a set on one batch and return their names; exceptions are reported.

    Args:
        model: The model to measure; it is in training mode afterwards.

    Raises:
        BrokenError: the metrics could not be made; the problem was reported.
    """
    if table.metrics not in code:
        return []
    key = f"{table.key}.metrics"
    metrics = report.call("factory", key, f"making {key}", lambda: code.call(table.metrics))
    model.eval()
    forward: list[tuple[Any, Any]] = []

    def outputs() -> tuple[Any, Any]:
        if not forward:
            forward.append(_outputs(code, model, table, batch))
        return forward[0]

    for name, entry in metrics.items():
        with suppress(BrokenError), torch.no_grad():
            given = None if code.has_loss or table.step in code else (model, batch)
            value = partial(_value, name, metric_of(entry), outputs, given)
            report.call("step", f"{key}.{name}", f"measuring {name}", value)
    model.train()
    return list(metrics)


def _outputs(code: EntryPoint, model: nn.Module, table: DataTable, batch: Any) -> tuple[Any, Any]:
    """Return the model's outputs for a batch, and the object that holds the targets."""
    with autocast(code.precision, CPU):
        if table.step in code:
            return outputs_and_targets(code[table.step](model, batch))
        if code.has_loss:
            return model(batch[0]), batch[1]
        is_step = not code.moves_optimizers
        with hearing(model) if is_step else nullcontext() as heard:
            if heard is None:
                return model, batch
            code["training_step"](model, batch)
            return heard(), batch


def _value(name: str, metric: Metric, outputs: Any, given: tuple[Any, Any] | None) -> float:
    if metric.is_of_loss:
        return of_loss(name, metric, _A_LOSS)
    if not metric.is_of_set:
        arguments = metric.chosen(*outputs()) if given is None or metric.takes_outputs else given
        with noting_arguments(name, *arguments):
            return number(name, metric.called()(*arguments))
    over_set = OverSet(name, metric, _SAMPLES)
    chosen, targets = unpacked(packed(metric.chosen(*outputs())).getbuffer())
    over_set.add(chosen, targets, _SAMPLES)
    return over_set.value()
