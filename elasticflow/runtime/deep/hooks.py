"""`--deep` calls each hook once, with the model after a step; what they log goes to a folder that is taken away."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.errors import HookError
from elasticflow.protocol.points import read_points
from elasticflow.runtime.deep.report import BrokenError
from elasticflow.runtime.deep.state import moves_optimizers
from elasticflow.runtime.hooks import hooks
from elasticflow.runtime.hooks.context import HookContext
from elasticflow.runtime.hooks.point_writer import PointWriter
from elasticflow.runtime.hooks.unchanged import Unchanged
from elasticflow.runtime.measuring.scalars import scalars_in
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.training.precision import autocast

if TYPE_CHECKING:
    from types import ModuleType

    from elasticflow.protocol.deep_messages import DeepJob
    from elasticflow.runtime.deep.report import Report
    from elasticflow.runtime.deep.state import Trained

_CPU = torch.device("cpu")
_AFTER_ONE_STEP = Position(step=1, offset=0, epoch=0, samples=0, is_epoch_end=False)


def try_out(
    report: Report,
    code: ModuleType,
    job: DeepJob,
    trained: Trained,
    result: Any,
    loss: float,
    *,
    dataset: Any,
) -> None:
    """Call the hooks that the job has, each once; what they raise, or change, is reported.

    Args:
        report: Where problems and notes go.
        code: The job's train.py as a module.
        job: The job.
        trained: What a step changed.
        result: What the step returned.
        loss: Its mean.
        dataset: The training data; None of data shards.
    """
    metrics: dict[str, Any] = {"loss": loss}
    if isinstance(result, dict):
        metrics |= {name: float(value) for name, value in scalars_in(result).items()}
    # By the names that a run has for them; of what they come to, nothing is promised here.
    always = () if moves_optimizers(code) else ("loss",)
    measured = {
        f"{each.name}.{metric}" if each.name else metric: loss
        for each in job.evaluations
        for metric in (*always, *each.metrics)
    }
    for name in hooks.NAMES:
        make = getattr(code, f"make_{name}", None)
        if make is not None:
            given = metrics if name != hooks.ON_EVALUATION else {**metrics, "eval": measured}
            with suppress(BrokenError), tempfile.TemporaryDirectory() as folder:
                _try(report, job, trained, name, make(), given, Path(folder), dataset)


def _try(
    report: Report,
    job: DeepJob,
    trained: Trained,
    name: str,
    hook: hooks.Hook,
    metrics: dict[str, Any],
    folder: Path,
    dataset: Any,
) -> None:
    model, average = trained.model, trained.average
    writer = PointWriter(folder, 1, 0)
    writer.begin(0)
    context = HookContext(
        name,
        _AFTER_ONE_STEP,
        rank=0,
        world_size=1,
        device=_CPU,
        model=model,
        ema=None if average is None else average.module,
        dataset=dataset,
        metrics=metrics,
        snapshot="000000000001-0001-00000000" if name == hooks.ON_SNAPSHOT else None,
        writer=writer,
    )
    unchanged = Unchanged([model] if average is None else [model, average])
    unchanged.begin(is_thorough=True)

    def call() -> None:
        key = random_streams.hook_key(job.seed, 1, 0, name)
        with (
            hooks.apart(model, None if average is None else average.module, _CPU, key),
            autocast(job.precision, _CPU),
        ):
            hook.call(context)

    report.call("step", f"hooks.{name}", f"calling hooks.{name}", call)
    try:
        unchanged.require(f'hooks.{name} = "{hook.entry}"')
    except HookError as error:
        report.refuse("step", f"hooks.{name}", error)
    logged = [f"{point['kind']} {point['name']}" for point in read_points(folder)]
    report.note(f"hooks.{name} logged {', '.join(logged) if logged else 'nothing'}")
