"""A plan in words and tables, for `plan` and `run --dry-run` (floor 5)."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.compiler.split import steps_per_epoch
from elasticflow.observe.formats import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.drift import Difference
    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.compiler.split import WorldRow
    from elasticflow.spec.job import Job

_MARGIN = 13
_HEADER = ("nodes", "workers", "samples each", "forwards each", "samples in one")
_EXACT_HEADER = ("instead of", "gradient sums", "traffic")


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
    if job.dataset.shards is not None:
        data = (
            f"{plural(job.dataset.shards, 'shard')} of unknown lengths; what a worker reads is whole shards"
        )
        yield _fact("data", data)
    yield _fact("steps", _steps(view))
    yield _fact("restarts", _restarts(view))
    yield _fact("snapshots", _snapshots(view))
    if job.evaluation is not None:
        names = ", ".join(["loss", *job.evaluation.metrics])
        yield _fact("evaluation", f"{_any_of(_listed(job.evaluation.every))} and at the end: {names}")
    yield from _drift(view)
    yield ""
    yield from _table(plan.worlds)
    yield from _notes(view)
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
    unknown = "is known after the first run (or set dataset.samples)"
    if dataset.shards is not None:
        unknown = "nobody knows before they are read"
    epochs = plural(train.epochs or 0, "epoch")
    if view.samples is None:
        return (
            f"{epochs}; how many steps {unknown}"
            if train.steps is None
            else f"{train.steps}; how many an epoch has {unknown}"
        )
    per_epoch = _or(*steps_per_epoch(view.job, view.samples))
    of = f"{plural(view.samples, 'sample')} by {dataset.global_batch_size}"
    if train.steps is None:
        return f"{view.steps}: {epochs} of {of}, {per_epoch} each"
    return f"{train.steps}; an epoch of {of} has {per_epoch}"


def _restarts(view: PlanView) -> str:
    table = view.job.restarts
    refill = f", full again after {table.refill}" if table.refill else ""
    return (
        f"{plural(table.budget, 'failure')}{refill}; no progress for {table.hang_timeout} is one, "
        "or for less once the run shows what is usual; "
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
    header = _HEADER if worlds[0].exact is None else _HEADER + _EXACT_HEADER
    rows = [header, *(_row(world) for world in worlds)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))


def _row(world: WorldRow) -> tuple[str, ...]:
    if world.world_size is None or world.samples_per_rank is None or world.micro_batch_size is None:
        return str(world.nodes), *("as found" for _ in _HEADER[1:])
    row = (
        *(str(world.nodes), str(world.world_size), _or(*world.samples_per_rank)),
        *(str(world.micro_batches), _or(*world.micro_batch_size)),
    )
    if world.exact is None:
        return row
    traffic = "none" if world.exact.traffic is None else f"{world.exact.traffic:g}"
    return *row, str(world.exact.batch_micro_batches), str(world.exact.gradient_copies), traffic


def _or(fewest: int, most: int) -> str:
    """Return `4`, `4 or 5` or `4 to 6`."""
    if fewest == most:
        return str(most)
    return f"{fewest} or {most}" if most == fewest + 1 else f"{fewest} to {most}"


def _notes(view: PlanView) -> Iterator[str]:
    """Yield what stands under the table: the formulas of what it leaves out, and what its columns mean."""
    job, worlds = view.job, view.plan.worlds
    batch, micro, shards = (
        job.dataset.global_batch_size,
        job.dataset.micro_batch_size,
        job.train.virtual_shards,
    )
    if len(worlds) <= view.plan.nodes_max - view.plan.nodes_min or worlds[0].world_size is None:
        yield ""
        if shards is None:
            size = "" if micro is None else f", in as few even forwards of at most {micro} as that takes"
            yield f"with W workers: each takes {batch} / W samples, rounded down or up{size}"
        else:
            yield f"with W workers: each runs {shards} / W forwards of {plural(batch // shards, 'sample')}, rounded down or up"
    if shards is not None:
        yield ""
        yield f"exact: a batch is {plural(shards, 'virtual shard')} of {plural(batch // shards, 'sample')}, a forward and backward each, instead of the"
        yield "forwards of batch mode; a worker holds at most so many sums of gradients, where batch mode holds one, and"
        yield "sends so many times the bytes of a ring all-reduce (at most log2(shards / workers) + 1 sums, and 1 times,"
        yield "where shards and workers are powers of two)"
