"""Calls for `--deep` what train.py calls after a step: the metrics of evaluation sets on one batch each, and each hook once."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.child.run import AFTER_ONE_STEP, CPU
from elasticflow.errors import HookError
from elasticflow.protocol.points import read_points
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
from elasticflow.runtime.loop import hooks
from elasticflow.runtime.loop.context import HookContext, PointWriter
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.scalars import scalars_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from elasticflow.deep.child.entry_point import DataTable, EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.deep.child.run import DeepRun
    from elasticflow.deep.child.state import Trained
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


def call_hooks(
    report: Report, code: EntryPoint, trained: Trained, run: DeepRun, measured: Iterable[str]
) -> None:
    """Call each of the job's hooks once, and report the exceptions they raise and the state they change.

    Hooks log to a folder that is then removed.
    """
    if "build_hooks" not in code:
        return
    metrics: dict[str, Any] = {"loss": run.loss}
    if isinstance(run.result, dict):
        metrics |= {name: float(value) for name, value in scalars_in(run.result).items()}
    # The values themselves mean nothing here.
    evaluated = dict.fromkeys(measured, run.loss)
    made = report.call("factory", "hooks", "making the hooks", lambda: code.call("build_hooks"))
    for name, hook in made.items():
        given = metrics if name != hooks.ON_EVALUATION else {**metrics, "eval": evaluated}
        with suppress(BrokenError), tempfile.TemporaryDirectory() as folder:
            _call_hook(report, code, trained, name, hook, given, Path(folder))


def _call_hook(
    report: Report,
    code: EntryPoint,
    trained: Trained,
    name: str,
    hook: hooks.Hook,
    metrics: dict[str, Any],
    folder: Path,
) -> None:
    model, average = trained.model, trained.average
    writer = PointWriter(folder, 1, 0)
    writer.begin(0)
    context = HookContext(
        name,
        AFTER_ONE_STEP,
        rank=0,
        world_size=1,
        device=CPU,
        model=model,
        ema=None if average is None else average.module,
        dataset=None if code.dataset is None else code.dataset.content,
        metrics=metrics,
        snapshot="000000000001-0001-00000000" if name == hooks.ON_SNAPSHOT else None,
        writer=writer,
    )
    unchanged = hooks.Unchanged([model] if average is None else [model, average])
    unchanged.begin(is_thorough=True)

    def call() -> None:
        key = random_streams.hook_key(code.seed, 1, 0, name)
        with (
            hooks.apart(model, None if average is None else average.module, CPU, key),
            autocast(code.precision, CPU),
        ):
            hook.call(context)

    report.call("step", f"hooks.{name}", f"calling hooks.{name}", call)
    try:
        unchanged.require(f'hooks.{name} = "{hook.entry}"')
    except HookError as error:
        report.refuse("step", f"hooks.{name}", error)
    logged = [f"{point['kind']} {point['name']}" for point in read_points(folder)]
    report.note(f"hooks.{name} logged {', '.join(logged) if logged else 'nothing'}")
