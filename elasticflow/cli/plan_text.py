"""A plan in words and tables, for `plan` and `run --dry-run` (floor 5)."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.observe.formats import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.drift import Difference
    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.compiler.split import WorldRow
    from elasticflow.spec.job import Job

_MARGIN = 13
_HEADER = ("nodes", "workers", "samples of a full batch, each", "forwards per step, each")


class PlanView(NamedTuple):
    """What is shown.

    Attributes:
        plan: The plan.
        job: The resolved job.
        samples: Length of the training data, if anything tells.
        steps: Steps of the whole run, if anything tells.
        last_run: Id of the job's newest run, if there is one.
        drift: What changed since; None if there is no run, or its job cannot be read.
    """

    plan: LaunchPlan
    job: Job
    samples: int | None
    steps: int | None
    last_run: str | None
    drift: list[Difference] | None


def lines_of(view: PlanView) -> Iterator[str]:
    """Yield the lines of the whole plan."""
    plan, job = view.plan, view.job
    yield _fact("job", f"{plan.job_name} ({', '.join(plan.job_files)}; digest {plan.job_digest[:16]})")
    yield _fact("nodes", _nodes(plan))
    yield _fact(
        "batch", f"{plural(job.dataset.global_batch_size, 'sample')} per step, at every number of nodes"
    )
    yield _fact("steps", _steps(view))
    yield _fact("restarts", _restarts(view))
    yield _fact("snapshots", _snapshots(view))
    if job.evaluation is not None:
        names = ", ".join(["loss", *job.evaluation.metrics])
        yield _fact("evaluation", f"{_any_of(_listed(job.evaluation.every))} and at the end: {names}")
    yield from _drift(view)
    yield ""
    yield from _table(plan.worlds)
    yield ""
    yield "python -m torch.distributed.run \\"
    *options, entry_point = plan.torchrun_args
    yield from (f"    {shlex.quote(option)} \\" for option in options)
    yield f"    {entry_point}"
    yield ""
    width = max(len(name) + len(value) for name, value in plan.environment.items()) + 1
    for name, value in plan.environment.items():
        yield f"{f'{name}={value}':<{width}}  # {plan.reasons[name]}"


def _fact(name: str, text: str) -> str:
    return f"{name:<{_MARGIN}}{text}"


def _listed(every: str | list[str]) -> tuple[str, ...]:
    return (every,) if isinstance(every, str) else tuple(every)


def _any_of(every: Sequence[str]) -> str:
    return "every " + " or ".join(every)


def _nodes(plan: LaunchPlan) -> str:
    low, high = plan.nodes_min, plan.nodes_max
    per_node = {
        "auto": "one worker per GPU, else per core",
        "gpu": "one worker per GPU",
        "cpu": "one worker per core",
    }
    each = per_node.get(str(plan.nproc_per_node)) or f"{plural(int(plan.nproc_per_node), 'worker')} each"
    place = "" if plan.endpoint is None else f", meeting at {plan.endpoint}"
    return f"{low if low == high else f'{low} to {high}'}, {each}{place}"


def _steps(view: PlanView) -> str:
    train, dataset = view.job.train, view.job.dataset
    if train.steps is not None:
        return str(train.steps)
    epochs = plural(train.epochs or 0, "epoch")
    if view.samples is None or view.steps is None:
        return f"{epochs}; how many steps is known after the first run (or set dataset.samples)"
    return f"{view.steps}: {epochs} of {plural(view.samples, 'sample')} by {dataset.global_batch_size}"


def _restarts(view: PlanView) -> str:
    table = view.job.restarts
    refill = f", full again after {table.refill}" if table.refill else ""
    return (
        f"{plural(table.budget, 'failure')}{refill}; no progress for {table.hang_timeout} is one; "
        "resizes, drains and preemptions are free"
    )


def _snapshots(view: PlanView) -> str:
    plan, keep = view.plan.snapshots, view.job.snapshots.keep
    place = plan.uri or f"runs/{view.plan.job_name}/<run id>"
    kept = [f"the last {keep.last}"]
    kept += [f"the best {keep.best}"] if keep.best is not None else []
    kept += [f"one per {keep.every}"] if keep.every is not None else []
    kept += [f"those of the last {keep.within}"] if keep.within is not None else []
    held = f"; held in memory every {plan.memory}" if plan.memory else ""
    return (
        f"{_any_of(plan.every)}, at the end and when asked to leave; in {place}; {', '.join(kept)} stay{held}"
    )


def _drift(view: PlanView) -> Iterator[str]:
    if view.last_run is None:
        return
    if view.drift is None:
        yield _fact("drift", f"the job of run {view.last_run} cannot be read")
    elif not view.drift:
        yield _fact("drift", f"none since run {view.last_run}")
    else:
        yield _fact("drift", f"since run {view.last_run}:")
        for each in view.drift:
            yield _fact("", f"{each.key}: {each.old!r} -> {each.new!r} ({each.weight}: {each.reason})")


def _table(worlds: Sequence[WorldRow]) -> Iterator[str]:
    rows = [_HEADER, *(_row(world) for world in worlds)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))


def _row(world: WorldRow) -> tuple[str, ...]:
    if world.samples_per_rank is None:
        return str(world.nodes), "as found", "as found", "as found"
    fewest, most = world.samples_per_rank
    samples = str(most) if fewest == most else f"{fewest} or {most}"
    return str(world.nodes), str(world.world_size), samples, str(world.micro_batches)
