"""A plan in words and tables, for `plan` and `run --dry-run`."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.cli.output import paint
from elasticflow.cli.write.plan_data import batch_in_words, batches_in_words, by, drawn_in_words
from elasticflow.cli.write.plan_logged import logged
from elasticflow.cli.write.plan_script import script_facts, script_restarts
from elasticflow.cli.write.plan_worlds import either, worlds_notes, worlds_table
from elasticflow.compiler.entry_point.evaluation_calls import measured_weights
from elasticflow.compiler.plan.script import torchrun_command
from elasticflow.compiler.provenance.drift import lines_of as drift_lines
from elasticflow.jobfile.checks.training_length import samples_per_epoch
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.entry_points.object_arguments import dataset_values
from elasticflow.observe.standbys import cost_in_words
from elasticflow.observe.terminal.formats import plural, size, span
from elasticflow.protocol.warm_restarts import MAY_STAND_BY
from elasticflow.system.units import intervals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elasticflow.compiler.plan.forecast import Forecast, Knowledge, KnownSets
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import EvaluationTable, Job
    from elasticflow.observe.estimates import RunFacts
    from elasticflow.protocol.key_weights import Weight
    from elasticflow.protocol.warm_restarts import Warm

_MARGIN = 13
_HELD = re.compile(r"(?<=\d) (?=[A-Za-z])|(?<=\brun) (?=\d)")
Answer = Literal["goes on", "asks", "refuses"]
_ANSWERS: dict[Answer, str] = {
    "goes on": "it could go on as this job",
    "asks": "it could go on as this job, with --accept-drift only",
    "refuses": "it cannot go on as this job",
}
_WARM: dict[Warm, str] = {
    "auto": "lost workers are forked anew with the job's imports or, where these start threads, there is a GPU or the model is "
    "compiled, replaced by standbys",
    "fork": "lost workers are forked anew with the job's imports, or with torch alone where these start threads",
    "standby": "lost workers are replaced by standbys",
    "off": "lost workers are started anew",
}
_COLOURS: dict[Weight, str] = {"corrupting": "red", "trajectory": "yellow", "harmless": "green"}


class PlanView(NamedTuple):
    """What is shown.

    Attributes:
        plan: The plan.
        job: The resolved job.
        known: What is known of data, model and machine, and from where.
        ahead: The forecast that follows from it.
        run_facts: What was learnt from the run that the job is compared with; None: there is no such run.
        answer: Whether that run could go on as this job.
        asides: Further facts to show, by name.
        sets: Of a mixture, if they are known.
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
    """Yield the lines of the whole plan, at most *width* wide where words can be broken.

    What people read comes last: that is what a terminal still shows.
    """
    yield from _command(view.plan, width)
    yield ""
    for name, text in _facts(view):
        first, *more = _wrapped(text, width - _MARGIN)
        yield paint(f"{name:<{_MARGIN}}", bold=True) + first
        yield from (f"{'':<{_MARGIN}}{line}" for line in more)
    if view.run_facts is not None and view.run_facts.drift:
        yield from _differences(view.run_facts.drift, width)
    yield ""
    yield from worlds_table(view.plan.worlds)
    for text in () if view.plan.script is not None else worlds_notes(view.job, view.plan):
        yield ""
        yield from textwrap.wrap(text, width, break_long_words=False)


def _command(plan: LaunchPlan, width: int) -> Iterator[str]:
    """Yield torchrun's command, which the launch is equal to, and the variables that it needs."""
    yield paint("# what follows in torchrun's words", dim=True)
    yield "python -m torch.distributed.run \\"
    program = 1 if plan.script is None else len(torchrun_command(plan.script))
    yield from (f"    {shlex.quote(option)} \\" for option in plan.torchrun_args[:-program])
    yield f"    {shlex.join(plan.torchrun_args[-program:])}"
    yield ""
    yield from _environment(plan, width)


def _wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines; none is broken between a number and its unit, or `run` and its id."""
    held = _HELD.sub("\0", text)
    lines = textwrap.wrap(held, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _facts(view: PlanView) -> Iterator[tuple[str, str]]:
    plan, job = view.plan, view.job
    yield "job", f"{plan.job_name} ({', '.join(plan.job_files)}; digest {plan.job_digest[:16]})"
    yield "nodes", _nodes(view)
    if plan.script is None:
        yield from _training(view)
    else:
        yield from script_facts(plan, plan.script, job)
        yield from logged(job)
        yield "restarts", script_restarts(job.restarts, plan.script)
    yield from view.asides.items()
    if view.run_facts is not None:
        yield "drift", _drift(view.run_facts, view.answer)


def _training(view: PlanView) -> Iterator[tuple[str, str]]:
    """Yield what only a job has that says what is trained: from its batches to its restarts."""
    job = view.job
    yield "batch", batch_in_words(job, view.known)
    if drawn := drawn_in_words(job, view.sets):
        yield "samples", drawn
    if made := batches_in_words(job):
        yield "batches", made
    if view.known.parameters is not None:
        yield "model", plural(int(view.known.parameters.value), "parameter") + by(view.known.parameters)
    if job.optimizer.groups:
        yield "parameters", _groups(job)
    if values := list(dataset_values(job.model_dump())):
        names = ", ".join(f"{dotted(path)} = {value}" for path, value in values)
        yield "from data", f"{names}; known when the training data is opened"
    if job.dataset.shards is not None:
        shards = plural(job.dataset.shards, "shard")
        yield (
            "data",
            f"{shards} of unknown lengths; a worker reads whole shards, each of which must yield the same whenever it is read",
        )
    yield "steps", _steps(view)
    yield "duration", _duration(view)
    if job.train.time_limit is not None:
        yield "", f"a launch leaves after {job.train.time_limit}, with a snapshot (exit code 75)"
    yield from _evaluations(view)
    yield from logged(job)
    yield "snapshots", _snapshots(view)
    yield "", _written(view)
    yield "", _kept(view)
    yield "restarts", _restarts(view)
    yield "", _warm(view)
    if job.train.compile:
        yield "compiler", _compiler(view)


def _evaluations(view: PlanView) -> Iterator[tuple[str, str]]:
    """Yield what is measured, when and on which samples, set by set; and what ends training by it."""
    job, times = view.job, view.ahead.evaluations
    for number, (name, of_set) in enumerate(job.evaluations.items()):
        names = ", ".join(dict.fromkeys(["loss", *of_set.metrics])) + _whose(job, of_set)
        count = times.get(name) if isinstance(times, dict) else times
        often = "" if count is None else f"; {count:,} time{'' if count == 1 else 's'}"
        part = (
            "" if of_set.samples is None else f"; at most {plural(of_set.samples, 'sample')}, always the same"
        )
        best = f"; best is {of_set.best}" if name and of_set.best is not None else ""
        when = f"{_any_of(intervals(of_set.every))} and at the end"
        yield (
            "" if number else "evaluation",
            f"{f'{name}: ' if name else ''}{when}: {names}{part}{best}{often}",
        )
    if job.train.stop_when is not None:
        yield "", f"training ends before its length: {job.train.stop_when}"


def _groups(job: Job) -> str:
    """Return which parameters have options of their own."""
    parts = []
    for group in job.optimizer.groups:
        selected = {"match": group.match, "ndim": group.ndim, "module": group.module}
        words = " and ".join(
            f"{key} {_listed(value)}" for key, value in selected.items() if value is not None
        )
        options = ", ".join(f"{key} {value}" for key, value in group.args.items())
        parts.append(f"{words}: {options}" if options else words)
    return f"{'; '.join(parts)}; the rest: optimizer.args; the first that fits counts"


def _listed(value: object) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _nodes(view: PlanView) -> str:
    plan = view.plan
    low, high = plan.nodes_min, plan.nodes_max
    per_node = {
        "auto": "one worker per GPU, else per core",
        "gpu": "one worker per GPU",
        "cpu": "one worker per core",
    }
    workers = per_node.get(str(plan.nproc_per_node)) or f"{plural(int(plan.nproc_per_node), 'worker')} each"
    meeting = "" if plan.endpoint is None else f", meeting at {plan.endpoint}"
    return f"{low if low == high else f'{low:,} to {high:,}'}, {workers}{meeting}"


def _whose(job: Job, evaluation: EvaluationTable) -> str:
    """Return ` of the averaged weights` where evaluations measure those, else nothing."""
    words = {
        "raw": "",
        "ema": " of the averaged weights",
        "both": " of the averaged weights, and of the raw ones",
    }
    return words[measured_weights(job, evaluation)]


def _steps(view: PlanView) -> str:
    train, dataset, ahead = view.job.train, view.job.dataset, view.ahead
    later = f"{_unknown(view, 'samples')}, or set dataset.samples"
    if dataset.shards is not None:
        later = "nobody knows before they are read"
    epochs = plural(train.epochs or 0, "epoch")
    known_samples = None if view.known.samples is None else int(view.known.samples.value)
    samples = samples_per_epoch(dataset, known_samples)
    if samples is None or ahead.steps_per_epoch is None:
        known = (
            f"{epochs}; how many steps: "
            if train.steps is None
            else f"{train.steps:,}; how many an epoch has: "
        )
        return known + later
    per_epoch = either(*ahead.steps_per_epoch)
    of = f"{plural(samples, 'sample')} by {dataset.global_batch_size:,}"
    source = "" if view.known.samples is None or samples != known_samples else by(view.known.samples)
    if train.steps is None:
        return f"{ahead.steps:,}: {epochs} of {of}, {per_epoch} each{source}"
    return f"{train.steps:,}; an epoch of {of} has {per_epoch}{source}"


def _duration(view: PlanView) -> str:
    known, ahead = view.known, view.ahead
    if known.step_s is None:
        return _unknown(view, "step_s").replace(", or with --deep", "")
    workers = "" if known.workers is None else f" with {plural(int(known.workers.value), 'worker')}"
    total = "" if ahead.duration_s is None else f"about {span(ahead.duration_s)}, "
    return f"{total}{span(known.step_s.value)} a step{workers}{by(known.step_s)}"


def _restarts(view: PlanView) -> str:
    table = view.job.restarts
    refill = f", full again after {table.refill}" if table.refill else ""
    if table.budget == 0:
        failures = "the first failure ends the run (exit code 3)"
    else:
        failures = (
            f"{plural(table.budget, 'failure')}{refill}; the next one ends the run (exit code 3). Workers start again at "
            "once, later ones after a pause of up to 1 min while no progress is made"
        )
    return (
        f"{failures}. No progress for {table.hang_timeout} is a failure, or for less once the run shows what is usual; "
        "the same error of the job's own code twice without a step between ends the run. Resizes, drains and preemptions are free"
    )


def _warm(view: PlanView) -> str:
    """Return what restarts find ready, and what that costs."""
    warm, known = view.job.restarts.warm, view.known
    text = _WARM[warm]
    if warm not in MAY_STAND_BY or known.standby_bytes is None or known.standby_s is None:
        return text
    cost = cost_in_words(known.standby_bytes.value, known.standby_s.value)
    return f"{text}; one takes {cost}{by(known.standby_bytes)}"


def _compiler(view: PlanView) -> str:
    """Return what torch.compile takes, and what its cache saves."""
    kept = "its cache is kept for the run on each node, and beside the snapshots for each kind of machine"
    known = view.known
    if known.compile_s is None:
        return f"torch.compile; {kept}"
    cached, held = known.compile_cached_s, known.compiler_cache_bytes
    saved = "" if cached is None else f", {cached.value:.1f} s with its cache"
    bytes_ = "" if held is None else f" ({size(held.value)})"
    return f"torch.compile took {known.compile_s.value:.1f} s{saved}{by(known.compile_s)}; {kept}{bytes_}"


def _drift(run_facts: RunFacts, answer: Answer) -> str:
    run = f"run {run_facts.run_id}{' (finished)' * run_facts.is_finished}"
    if run_facts.drift is None:
        return f"the job of {run} cannot be read"
    if not run_facts.drift:
        return f"none since {run}"
    return f"since {run}; {_ANSWERS[answer]}:"


def _differences(drift: Sequence[Difference], width: int) -> Iterator[str]:
    """Yield the table of differences; a reason that does not fit on its line stands below it."""
    for line in drift_lines(drift, lambda text, weight: paint(text, _COLOURS[weight], bold=True)):
        if len(line) <= width:
            yield line
            continue
        change, _, reason = line.rpartition("  ")
        yield change.rstrip()
        yield from textwrap.wrap(reason, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _environment(plan: LaunchPlan, width: int) -> Iterator[str]:
    """Yield the variables, and above those with the same reason that reason."""
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


def _any_of(every: Sequence[str]) -> str:
    """Return `every 10 min or 1 epoch`."""
    return "every " + " or ".join(every)


def _unknown(view: PlanView, fact: str) -> str:
    """Return when a fact will be known, and why the last run does not say it."""
    why = "known after the first run, or with --deep"
    if view.run_facts is not None and fact in view.run_facts.outdated:
        return f"{why} (run {view.run_facts.run_id} had another {view.run_facts.outdated[fact]})"
    return why


def _snapshots(view: PlanView) -> str:
    """Return when and where snapshots are taken."""
    plan = view.plan.snapshots
    destination = plan.uri or f"runs/{view.plan.job_name}/<run id>"
    held = f"; held in memory every {plan.memory}" if plan.memory else ""
    best = "" if view.job.snapshots.keep.best is None else ", at each new best value"
    return f"{_any_of(plan.every)}{best}, at the end and when asked to leave; in {destination}{held}"


def _written(view: PlanView) -> str:
    """Return how large snapshots are, how often they are written, and how many bytes that makes."""
    ahead, known = view.ahead, view.known.snapshot_bytes
    best = "" if view.job.snapshots.keep.best is None else ", and one for each new best value"
    parts = [
        f"how large: {_unknown(view, 'snapshot_bytes')}"
        if known is None
        else f"{size(known.value)} each{by(known)}"
    ]
    if ahead.snapshots_per_hour is None:
        parts.append("how many an hour: known after the first run")
    else:
        word = "at least" if ahead.is_least else "about"
        rate = f"{word} {ahead.snapshots_per_hour:,.0f} an hour{best}"
        parts.append(
            rate if ahead.bytes_per_hour is None else f"{rate}, {size(ahead.bytes_per_hour)} an hour"
        )
    if ahead.snapshots is not None and not ahead.is_least:
        total = "" if known is None else f", {size(ahead.snapshots * known.value)}"
        parts.append(f"{ahead.snapshots:,} in the whole run{total}")
    return "; ".join(parts)


def _kept(view: PlanView) -> str:
    """Return which snapshots stay, and how many bytes these are at most."""
    keep, ahead = view.job.snapshots.keep, view.ahead
    stay = [f"the last {keep.last}"]
    stay += [f"the best {keep.best}"] if keep.best is not None else []
    stay += [f"one every {keep.every}"] if keep.every is not None else []
    stay += [f"those of the last {keep.within}"] if keep.within is not None else []
    rules = stay[0] if len(stay) == 1 else f"{', '.join(stay[:-1])} and {stay[-1]}"
    if ahead.kept is None:
        return f"{rules} stay; how many that are: known after the first run"
    held = "" if ahead.kept_bytes is None else f", {size(ahead.kept_bytes)}"
    return f"{rules} stay: at most {ahead.kept:,}{held}, and one more while it is written"
