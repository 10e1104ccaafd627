"""A plan in words and tables, for `plan` and `run --dry-run`."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.cli.output import paint, paint_weight, table
from elasticflow.cli.write.plan_facts import facts
from elasticflow.compiler.plan.batch_split import worlds
from elasticflow.compiler.plan.launch_plan import torchrun_command
from elasticflow.compiler.provenance.drift import lines_of as drift_lines
from elasticflow.jobfile.checks.training_length import samples_per_epoch
from elasticflow.observe.terminal.formats import plural, size, span
from elasticflow.protocol.child_processes import MAY_STAND_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from elasticflow.compiler.plan.batch_split import WorldRow
    from elasticflow.compiler.plan.forecast import Forecast, Knowledge, Known, KnownSets
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.parallel import ParallelTable
    from elasticflow.observe.estimates import RunFacts

_MARGIN = 13
_HELD = re.compile(r"(?<=\d) (?=[A-Za-z])|(?<=\brun) (?=\d)")
Answer = Literal["goes on", "asks", "refuses"]
_ANSWERS: dict[Answer, str] = {
    "goes on": "it could continue as this job",
    "asks": "it could continue as this job, with --accept-drift only",
    "refuses": "it cannot continue as this job",
}


class PlanView(NamedTuple):
    """The content of a plan for the terminal.

    Attributes:
        run_facts: Facts of the run that the job is compared with; None: there is no such run.
        answer: The answer to whether that run could continue as this job.
    """

    plan: LaunchPlan
    job: Job
    known: Knowledge
    ahead: Forecast
    run_facts: RunFacts | None
    answer: Answer
    asides: Mapping[str, str]
    sets: KnownSets | None = None


def lines_of(view: PlanView, width: int) -> Iterator[str]:
    """Yield the lines of the whole plan, at most *width* wide where words can be broken; facts first, the command last."""
    told = [*facts(view.plan, view.job, view.known, view.sets), *view.asides.items()]
    if view.run_facts is not None:
        told.append(("drift", _drift(view.run_facts, view.answer)))
    for name, text in told:
        first, *more = _wrapped(text, width - _MARGIN)
        yield paint(f"{name:<{_MARGIN}}", bold=True) + first
        yield from (f"{'':<{_MARGIN}}{line}" for line in more)
    if view.run_facts is not None and view.run_facts.drift:
        yield from _differences(view.run_facts.drift, width)
    if view.plan.script is None:
        yield ""
        yield from figures_table(view.job, view.known, view.ahead, view.run_facts)
    yield ""
    rows = tuple(worlds(view.job))
    yield from worlds_table(rows)
    for text in () if view.plan.script is not None else worlds_notes(view.job, rows):
        yield ""
        yield from textwrap.wrap(text, width, break_long_words=False)
    yield ""
    yield from _command(view.plan, width)


def _command(plan: LaunchPlan, width: int) -> Iterator[str]:
    yield paint("# the launch as a command of torchrun", dim=True)
    if plan.script is None:  # another train.py may lie in the project
        yield paint("# (its train.py and torchrun.sh: elasticflow plan JOB -o DIR)", dim=True)
    yield "python -m torch.distributed.run \\"
    program = 1 if plan.script is None else len(torchrun_command(plan.script))
    yield from (f"    {shlex.quote(option)} \\" for option in plan.torchrun_args[:-program])
    yield f"    {shlex.join(plan.torchrun_args[-program:])}"
    yield ""
    yield from _environment(plan, width)


def _wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines, never broken between a number and its unit, or between `run` and the run's id."""
    held = _HELD.sub("\0", text)
    lines = textwrap.wrap(held, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _drift(run_facts: RunFacts, answer: Answer) -> str:
    run = f"run {run_facts.run_id}{' (finished)' * run_facts.is_finished}"
    if run_facts.drift is None:
        return f"the job of {run} cannot be read"
    if not run_facts.drift:
        return f"none since {run}"
    return f"since {run}; {_ANSWERS[answer]}:"


def _differences(drift: Sequence[Difference], width: int) -> Iterator[str]:
    """Yield the table of differences; a reason that does not fit on the line is on the next one."""
    for line in drift_lines(drift, paint_weight):
        if len(line) <= width:
            yield line
            continue
        change, _, reason = line.rpartition("  ")
        yield change.rstrip()
        yield from textwrap.wrap(reason, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _environment(plan: LaunchPlan, width: int) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name, value in plan.environment.items():
        groups.setdefault(plan.reasons[name], []).append(f"{name}={shlex.quote(value)}")
    for reason, settings in groups.items():
        for line in textwrap.wrap(reason, width - 2):
            yield paint(f"# {line}", dim=True)
        yield from settings
    if plan.env or plan.env_secrets:
        yield paint("# [env] of the job, before torch is imported", dim=True)
    yield from (f"{name}={shlex.quote(value)}" for name, value in plan.env.items())
    yield from (f"{name}=***" for name in plan.env_secrets)


Row = tuple[str, str, str]
_AFTER_RUN = "known after the first run"
_WITH_DEEP = f"{_AFTER_RUN}, or with --deep"

# Blocks that a worker holds whole at most while it trains, measured: gathered, gathered ahead, a gradient, gradients on their way.
_WHOLE_BLOCKS = 5
_DEGREES = 4  # 1, 2, 4, 8, where only the machine tells the number of workers

_HEADER = (
    ("", "nodes"),
    ("", "workers"),
    ("samples of", "a worker"),
    ("forwards of", "a worker"),
    ("samples of", "a forward"),
)
_HEADER_OF_SCRIPT = ("nodes", "workers")
_EXACT_HEADER = (("forwards", "of batch mode"), ("gradient", "sums"), ("", "traffic"))


def figures_table(job: Job, known: Knowledge, ahead: Forecast, run_facts: RunFacts | None) -> Iterator[str]:
    """Yield the table of durations, bytes and counts; an unknown figure is `-`, with the time at which it will be known."""
    outdated = {} if run_facts is None else run_facts.outdated

    def measured(name: str, field: str, show: Callable[[float], str], unknown: str, more: str = "") -> Row:
        fact: Known | None = getattr(known, field)
        if fact is not None:
            return name, show(fact.value), f"{fact.source}{more}"
        if run_facts is not None and field in outdated:
            return name, "-", f"{unknown} (run {run_facts.run_id} had another {outdated[field]})"
        return name, "-", unknown

    rows = [*_length(job, known, ahead, measured), *_snapshots(job, ahead, measured)]
    rows += [] if job.parallel is None else _memory(job, job.parallel, known)
    if job.restarts.warm in MAY_STAND_BY and known.standby_bytes is not None:
        ready = "" if known.standby_s is None else f"; {span(known.standby_s.value)} to get ready"
        rows.append(measured("a standby", "standby_bytes", size, "", ready))
    if job.train.compile:
        cached = known.compile_cached_s
        saved = "" if cached is None else f"; {span(cached.value)} with its cache"
        rows.append(measured("compiling", "compile_s", span, _AFTER_RUN, saved))
        rows.append(measured("  its cache", "compiler_cache_bytes", size, _AFTER_RUN))
    yield from table(("figure", "amount", "from"), rows)


def _length(job: Job, known: Knowledge, ahead: Forecast, measured: Callable[..., Row]) -> Iterator[Row]:
    is_read = job.dataset.shards is None
    unknown = f"{_WITH_DEEP}, or set dataset.samples" if is_read else "unknown until they are read"
    yield measured("samples", "samples", _count, unknown)
    if known.parameters is not None:
        yield measured("parameters", "parameters", _count, "")
    samples = samples_per_epoch(job.dataset, None if known.samples is None else int(known.samples.value))
    if samples is not None and ahead.steps_per_epoch is not None:
        by = f"{plural(samples, 'sample')} by {job.dataset.global_batch_size:,}"
        yield "steps of an epoch", either(*ahead.steps_per_epoch), by
    length = "train.steps" if job.train.epochs is None else plural(job.train.epochs, "epoch")
    yield "steps", "-" if ahead.steps is None else _count(ahead.steps), length
    workers = "" if known.workers is None else f", with {plural(int(known.workers.value), 'worker')}"
    yield measured("a step", "step_s", span, _AFTER_RUN, workers)
    if ahead.duration_s is not None:
        yield "training", f"about {span(ahead.duration_s)}", ""
    times = ahead.evaluations if isinstance(ahead.evaluations, dict) else {"": ahead.evaluations}
    for name, count in times.items():
        if count is not None:
            yield f"evaluations{f' of {name}' if name else ''}", _count(count), ""


def _snapshots(job: Job, ahead: Forecast, measured: Callable[..., Row]) -> Iterator[Row]:
    yield measured("a snapshot", "snapshot_bytes", size, _WITH_DEEP)
    rate, written = ahead.snapshots_per_hour, ahead.bytes_per_hour
    if rate is None:
        yield "  an hour", "-", _AFTER_RUN
    else:
        best = "" if job.snapshots.keep.best is None else "at most one more for each new best value"
        more = [text for text in ("" if written is None else size(written), best) if text]
        yield "  an hour", f"{'at least' if ahead.is_least else 'about'} {rate:,.0f}", ", ".join(more)
    if rate and ahead.snapshots is not None and not ahead.is_least:
        yield (
            "  in all",
            _count(ahead.snapshots),
            "" if written is None else size(ahead.snapshots * written / rate),
        )
    if ahead.kept is None:
        yield "  that stay", "-", _AFTER_RUN
    else:
        held = "" if ahead.kept_bytes is None else f"{size(ahead.kept_bytes)}, "
        yield "  that stay", f"at most {ahead.kept:,}", f"{held}and one more while it is written"


def _memory(job: Job, parallel: ParallelTable, known: Knowledge) -> Iterator[Row]:
    """Yield a worker's bytes at the job's degree and at others, once the sizes of the model and of a snapshot are known.

    If the model is offloaded, there is a row for the worker's device and a row for the CPU's memory.
    """
    shard, is_offloaded = parallel.shard, parallel.offload is not None
    if known.parameters is None or known.snapshot_bytes is None:
        yield "of a worker", "-", _WITH_DEEP
        return
    weights, state = 4 * known.parameters.value, known.snapshot_bytes.value
    most, is_exact = job.nodes.largest_world_size
    own = shard if isinstance(shard, int) else most if shard == "all" else most // job.nodes.max
    degrees = {1 << power for power in range(_DEGREES if not is_exact else most.bit_length())}
    for degree in sorted({*degrees, own} if is_exact or isinstance(shard, int) else degrees):
        block = 0 if known.block_bytes is None else known.block_bytes.value
        held = {
            "parameters": weights / degree,
            "gradients": weights / degree,
            "the optimizer's and other state": max(0.0, state - weights) / degree,
        }
        gathered = (
            {f"{_WHOLE_BLOCKS} blocks whole": _WHOLE_BLOCKS * block} if degree > 1 or is_offloaded else {}
        )
        if is_offloaded:
            summed = {"sums of gradients": weights / degree}
            yield _of_worker(f"a worker's device at {degree}", {**summed, **gathered})
            yield _of_worker("  in the CPU's memory", held)
        else:
            yield _of_worker(f"a worker at {degree}", {**held, **gathered})
    if is_exact:
        yield "  staging", size(state / most), f"of each of {plural(most, 'worker')}, for a snapshot"


def _of_worker(name: str, parts: Mapping[str, float]) -> Row:
    each = ", ".join(f"{size(part)} {named}" for named, part in parts.items() if part)
    return name, size(sum(parts.values())), each


def _count(number: float) -> str:
    return f"{int(number):,}"


def worlds_table(worlds: Sequence[WorldRow]) -> Iterator[str]:
    """Yield the header of two lines and a line for each world size."""
    if all(world.samples_per_rank is None and world.world_size is not None for world in worlds):
        yield from table(_HEADER_OF_SCRIPT, map(_workers, worlds), justify="right")
        return
    header = _HEADER if worlds[0].exact is None else _HEADER + _EXACT_HEADER
    yield from table(["\n".join(lines) for lines in header], map(_row, worlds), justify="right")


def _workers(world: WorldRow) -> tuple[str, str]:
    """Return the row of a world size if a script splits the batches, or if the workers of a node are unknown."""
    return f"{world.nodes:,}", "as found" if world.world_size is None else f"{world.world_size:,}"


def _row(world: WorldRow) -> tuple[str, ...]:
    nodes = f"{world.nodes:,}"
    if world.world_size is None or world.samples_per_rank is None or world.micro_batch_size is None:
        return nodes, *("as found" for _ in _HEADER[1:])
    row = (
        *(nodes, f"{world.world_size:,}", either(*world.samples_per_rank)),
        *(f"{world.micro_batches:,}", either(*world.micro_batch_size)),
    )
    if world.exact is None:
        return row
    traffic = "none" if world.exact.traffic is None else f"{world.exact.traffic:g}"
    return *row, f"{world.exact.batch_micro_batches:,}", f"{world.exact.gradient_copies:,}", traffic


def either(fewest: int, most: int) -> str:
    """Return `4`, `4 or 5` or `4 to 6`."""
    if fewest == most:
        return f"{most:,}"
    return f"{fewest:,} or {most:,}" if most == fewest + 1 else f"{fewest:,} to {most:,}"


def worlds_notes(job: Job, rows: Sequence[WorldRow]) -> Iterator[str]:
    """Yield the notes under the table: formulas for the rows it leaves out, and the meanings of its columns."""
    batch, micro, shards = (
        job.dataset.global_batch_size,
        job.dataset.micro_batch_size,
        job.train.virtual_shards,
    )
    if len(rows) <= job.nodes.max - job.nodes.min or rows[0].world_size is None:
        if shards is None:
            size = "" if micro is None else f", in as few even forwards of at most {micro:,} as that takes"
            yield f"with W workers: each takes {batch:,} / W samples, rounded down or up{size}"
        else:
            yield f"with W workers: each runs {shards:,} / W forwards of {plural(batch // shards, 'sample')}, rounded down or up"
    if shards is not None and job.parallel is None:
        yield (
            f"exact: a batch is {plural(shards, 'virtual shard')} of {plural(batch // shards, 'sample')}, a forward and "
            "backward each, instead of the forwards of batch mode; a worker holds at most so many sums of gradients, where "
            "batch mode holds one, and sends so many times the bytes of a ring all-reduce (at most log2(shards / workers) "
            "+ 1 sums, and 1 times, where shards and workers are powers of two)"
        )
