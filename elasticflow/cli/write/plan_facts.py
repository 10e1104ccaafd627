"""The lines of `plan` about a job, each with a name: from its nodes to the cost of a failure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.values import measured_weights
from elasticflow.compiler.plan.batch_split import node_counts_of
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.entry_points.object_arguments import dataset_values
from elasticflow.jobfile.tables.evaluation import path_of_set
from elasticflow.jobfile.tables.types import collate_entry
from elasticflow.observe.terminal.formats import plural
from elasticflow.protocol.snapshot_settings import AUTO, HELD_STATES
from elasticflow.sinks.registry import missing_of
from elasticflow.system.units import intervals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.plan.forecast import Knowledge, KnownSets
    from elasticflow.compiler.plan.launch_plan import LaunchPlan, ScriptPlan
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.parallel import ParallelTable
    from elasticflow.protocol.child_processes import Warm
    from elasticflow.protocol.snapshot_settings import SnapshotSettings

Fact = tuple[str, str]
_MOST_NAMED = 8
_PER_NODE = {
    "auto": "one worker per GPU, else per core",
    "gpu": "one worker per GPU",
    "cpu": "one worker per core",
}
_WEIGHTS = {
    "raw": "",
    "ema": " of the averaged weights",
    "both": " of the averaged weights, and of the raw ones",
}
_WARM: dict[Warm, str] = {
    "auto": "lost workers are forked anew with the job's imports or, where these start threads, there is a GPU or the model is "
    "compiled, replaced by standbys",
    "fork": "lost workers are forked anew with the job's imports, or with torch alone where these start threads",
    "standby": "lost workers are replaced by standbys",
    "off": "lost workers are started anew",
}


def facts(plan: LaunchPlan, job: Job, known: Knowledge, sets: KnownSets | None) -> Iterator[Fact]:
    """Yield name and text of each line; a line without a name belongs to the one before."""
    yield "job", f"{plan.job_name} ({', '.join(plan.job_files)}; digest {plan.job_digest[:16]})"
    low, high, per_node = plan.nodes_min, plan.nodes_max, plan.nproc_per_node
    workers = _PER_NODE.get(str(per_node)) or f"{plural(int(per_node), 'worker')} each"
    meeting = "" if plan.endpoint is None else f", meeting at {plan.endpoint}"
    device = "" if job.nodes.device_of_workers == "auto" else f", on {job.nodes.device_of_workers}"
    yield "nodes", f"{low if low == high else f'{low:,} to {high:,}'}, {workers}{device}{meeting}"
    if plan.script is not None:
        yield from _of_script(plan, plan.script, job)
        yield from _logged(job)
    else:
        yield from _of_data(job, known, sets)
        yield from _of_training(job)
        if job.parallel is not None:
            yield from _of_parallel(job, job.parallel)
        yield from _logged(job)
        yield from _of_snapshots(plan, job)
    yield from _of_failures(plan, job)


def _of_script(plan: LaunchPlan, script: ScriptPlan, job: Job) -> Iterator[Fact]:
    yield "script", shlex.join([*shlex.split(script.shown), *script.args])
    yield "", "started in the project root, with torchrun's variables; each start has another MASTER_PORT"
    yield (
        "imports",
        f"{', '.join(['torch', *plan.modules])}: once for all workers and restarts; the rest by each worker",
    )
    yield (
        "checkpoints",
        "without `elasticflow.join` in it, the script's own: a restart begins it again, and it trains on only if it loads what it has saved",
    )
    yield (
        "",
        "with `elasticflow.join`: [snapshots], steps for status and report, and each sample once by `run.batches`",
    )
    yield (
        "drain",
        f"SIGTERM to each worker, {job.snapshots.grace} to leave in, with any exit code (75 of the launch); then it is killed",
    )


def _of_data(job: Job, known: Knowledge, sets: KnownSets | None) -> Iterator[Fact]:
    batch, samples = job.dataset.global_batch_size, known.samples
    more = ""
    if samples is not None and batch > samples.value:
        by = "" if samples.source == "dataset.samples" else f" ({samples.source})"
        more = f"; more than the whole dataset, which has {plural(int(samples.value), 'sample')}{by}"
    yield "batch", f"{plural(batch, 'sample')} per step, at every number of nodes{more}"
    if drawn := drawn_in_words(job, sets):
        yield "samples", drawn
    makers = [("", job.dataset.collate)]
    makers += [(f" of {dotted(path_of_set(name))}'s", each.collate) for name, each in job.evaluations.items()]
    if made := [f"made by {collate_entry(each)}{of}" for of, each in makers if each is not None]:
        yield "batches", "; ".join(made)
    if values := list(dataset_values(job.as_tables())):
        names = ", ".join(f"{dotted(path)} = {value}" for path, value in values)
        yield "from data", f"{names}; known when the training data is opened"
    if job.dataset.shards is not None:
        shards = plural(job.dataset.shards, "shard")
        yield (
            "data",
            f"{shards} of unknown lengths; a worker reads whole shards, each of which must yield the same whenever it is read",
        )


def drawn_in_words(job: Job, sets: KnownSets | None) -> str | None:
    """Return the order of samples in words; None if each sample comes once per epoch, in a shuffled order."""
    sampler = job.dataset.sampler
    if job.dataset.mix:
        return _mixture_in_words(job, sets)
    if sampler is None:
        return None
    if sampler.kind == "bucket_by":
        return f"in batches of similar length ({sampler.values}), shuffled; each sample once per epoch"
    words = {
        "weights": f"as often as {sampler.values} says",
        "balance_by": f"each class of {sampler.values} equally often",
    }
    epoch = "as many draws as there are samples" if sampler.draws is None else plural(sampler.draws, "draw")
    return f"with replacement, {words[sampler.kind]}; an epoch is {epoch}"


def _mixture_in_words(job: Job, known: KnownSets | None) -> str:
    """Return each set's share, and the number of times its samples come in an epoch, as far as known."""
    names = [each.entry for each in job.dataset.mix]
    weights = [each.weight for each in job.dataset.mix if each.weight is not None]
    epoch = "an epoch is as many samples as all sets have"
    if known is not None:
        places = sum(known.samples)
        parts = [
            f"{share:.1%} {name} ({size:,} samples, each {places * share / size:.3g} times an epoch)"
            for name, size, share in zip(names, known.samples, known.shares, strict=True)
        ]
        return f"{', '.join(parts)} ({known.source}); {epoch}"
    if weights:
        parts = [f"{weight / sum(weights):.1%} {name}" for name, weight in zip(names, weights, strict=True)]
        return f"{', '.join(parts)}; {epoch}; how often the samples of each come in it: known with --deep"
    sampler = job.dataset.sampler
    how = "by their sizes" if sampler is None else f"by their sizes at temperature {sampler.temperature:g}"
    return f"{', '.join(names)}, {how}: shares are known with --deep; {epoch}"


def _of_training(job: Job) -> Iterator[Fact]:
    if job.optimizer.groups:
        parts = []
        for group in job.optimizer.groups:
            selected = {"match": group.match, "ndim": group.ndim, "module": group.module}
            words = [f"{key} {_listed(value)}" for key, value in selected.items() if value is not None]
            options = ", ".join(f"{key} {value}" for key, value in group.args.items())
            parts.append(" and ".join(words) + (f": {options}" if options else ""))
        yield "parameters", f"{'; '.join(parts)}; the rest: optimizer.args; the first that fits counts"
    if job.train.compile:
        yield (
            "compiler",
            "torch.compile; its cache is kept for the run on each node, and beside the snapshots for each kind of machine",
        )
    for number, (name, table) in enumerate(job.evaluations.items()):
        when = f"{'' if not name else f'{name}: '}{_any_of(intervals(table.every))} and at the end"
        metrics = ", ".join(dict.fromkeys(["loss", *table.metrics])) + _WEIGHTS[measured_weights(job, table)]
        most = table.samples
        part = "" if most is None else f"; at most {plural(most, 'sample')}, always the same"
        best = f"; best is {table.best}" if name and table.best is not None else ""
        yield "" if number else "evaluation", f"{when}: {metrics}{part}{best}"
    if job.train.stop_when is not None:
        yield "ends early", job.train.stop_when
    if job.train.time_limit is not None:
        yield "time limit", f"a launch leaves after {job.train.time_limit}, with a snapshot (exit code 75)"


def _of_parallel(job: Job, table: ParallelTable) -> Iterator[Fact]:
    """Yield on how many workers a copy of the model is, and the numbers of nodes that can train with such copies."""
    where = {"node": "the workers of each node", "all": "all workers"}.get(str(table.shard))
    wrap = " or ".join(table.wrap) or "the elements of its longest ModuleList"
    workers = where or plural(int(table.shard), "worker")
    yield "sharded", f"a copy of the model on {workers}, gathered block by block ({wrap})"
    if table.offload is not None:
        yield (
            "",
            "its parts are in the CPU's memory, the optimizer moves there; workers without an accelerator leave that out",
        )
    counts, low, high = node_counts_of(job), job.nodes.min, job.nodes.max
    if len(counts) < high - low + 1:
        named = _listed(list(counts))
        if len(counts) > _MOST_NAMED:
            named = f"multiples of {counts.step} from {counts[0]} to {counts[-1]}"
        yield "", f"trains on {named} nodes; with other numbers the rest wait as spares"
    elif isinstance(table.shard, int) and not isinstance(job.nodes.nproc_per_node, int):
        yield "", "trains on numbers of nodes whose workers it divides; with others the rest wait as spares"
    elif table.shard == "all":
        yield "", "no second copy is there to compare it with"


def _listed(value: object) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _any_of(every: Sequence[str]) -> str:
    """Return `every 10 min or 1 epoch`."""
    return "every " + " or ".join(every)


def _logged(job: Job) -> Iterator[Fact]:
    """Yield the job's further measures, its sinks, its notifications and its hooks."""
    parts = []
    if job.logging.count_name is not None:
        parts.append(f"{job.logging.count_name}/s, by the count of model.step or model.loss_count")
    if job.script is None and job.model.flops_per_sample is not None:
        peak = job.logging.peak_flops
        of = "the GPU's peak, if it is known by its name" if peak is None else f"{peak:.4g} FLOP/s a device"
        parts.append(f"MFU, of {of}")
    if job.logging.grad_norm:
        parts.append("the gradient's norm")
    if parts:
        yield "logged", "; ".join(parts)
    sinks = []
    for name, options in job.logging.chosen_sinks().items():
        given = ", ".join(f"{key} {value}" for key, value in options.items())
        missing = missing_of(name)
        remedy = f", not installed: pip install 'elasticflow[{missing}]'" if missing else ""
        sinks.append(f"{name}{f' ({given})' if given and name not in job.logging.custom else ''}{remedy}")
    if sinks:
        yield "sinks", "; ".join(sinks)
    if job.notify is not None:
        told = f"{', '.join(job.notify.ways())}, on {', '.join(job.notify.on)}"
        yield "notify", told.replace("notify.", "")
    hooks = [
        f"{name} {hook.entry}{'' if hook.every is None else f' each {hook.every}'}{', on all ranks' * hook.all_ranks}"
        for name, hook in ({} if job.hooks is None else job.hooks.named()).items()
    ]
    if hooks:
        yield "hooks", "; ".join(hooks)


def _of_snapshots(plan: LaunchPlan, job: Job) -> Iterator[Fact]:
    settings, keep = plan.snapshots, job.snapshots.keep
    best = "" if keep.best is None else ", at each new best value"
    place = settings.uri or f"runs/{plan.job_name}/<run id>"
    yield (
        "snapshots",
        f"{_any_of(settings.every)}{best}, at the end and when asked to leave; in {place}",
    )
    stay = [f"the last {keep.last}"]
    stay += [f"the best {keep.best}"] if keep.best is not None else []
    stay += [f"one every {keep.every}"] if keep.every is not None else []
    stay += [f"those of the last {keep.within}"] if keep.within is not None else []
    yield "", f"{' and '.join([', '.join(stay[:-1]), stay[-1]] if stay[:-1] else stay)} stay"
    yield "", _of_memory(settings, job.nodes.max)


def _of_memory(settings: SnapshotSettings, nodes: int) -> str:
    """Return how often the state is held in memory, and how many steps a death costs with that and without."""
    if settings.memory is None:
        return "nothing is held in memory: a death costs the steps since the last snapshot"
    often, third = f"every {settings.memory}", ""
    if settings.memory == AUTO:
        third = f", {HELD_STATES} while a snapshot is written, if there is room"
        often = "as often as 2 % of the time allows, if half of the free memory has room"
    where, what, else_ = "memory", "a worker's death", "the machine or its agent dies"
    if nodes > 1 and settings.memory == AUTO:
        where, what, else_ = "each node's memory", "the death of a worker or a node", "all nodes die"
    elif nodes > 1:
        where = "memory while all workers are on one node"
    return (
        f"held in {where}, {often} ({settings.held_states} times the state{third}): {what} costs the steps since then; without, "
        f"or if {else_}, those since the last snapshot"
    )


def _of_failures(plan: LaunchPlan, job: Job) -> Iterator[Fact]:
    table, script = job.restarts, plan.script
    refill = f", full again after {table.refill}" if table.refill else ""
    cost = f"{plural(table.budget, 'failure')}{refill}; the next one ends the run (exit code 3)"
    if table.budget == 0:
        cost = "the first failure ends the run (exit code 3)"
    if script is None:
        hang = (
            f"No progress for {table.hang_timeout} is a failure, or for less once the run shows what is usual"
        )
    elif script.silence_s is None:
        hang = "Nothing counts as a hang: set script.silence"
    else:
        hang = f"No line from any worker for {script.silence_s:g} s is a failure"
    yield "restarts", f"{cost}. {hang}. Resizes, drains and preemptions are free"
    if script is None:
        yield "", _WARM[table.warm]
