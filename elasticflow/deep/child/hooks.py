"""Calls each hook once for `--deep`, with the model after a step; hooks log to a folder that is then removed."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.child.run import AFTER_ONE_STEP, CPU
from elasticflow.errors import HookError
from elasticflow.protocol.points import read_points
from elasticflow.runtime.loop import hooks
from elasticflow.runtime.loop.context import HookContext, PointWriter
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.scalars import scalars_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.deep.child.entry_point import EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.deep.child.run import DeepRun
    from elasticflow.deep.child.state import Trained


def try_out(
    report: Report, code: EntryPoint, trained: Trained, run: DeepRun, measured: Iterable[str]
) -> None:
    """Call each of the job's hooks once, and report the exceptions they raise and the state they change."""
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
            _try(report, code, trained, name, hook, given, Path(folder))


def _try(
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
