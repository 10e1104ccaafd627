"""Checks that need several tables at once: closed forms over the whole node range."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.evaluation import check_evaluation_data, check_stop_when
from elasticflow.jobfile.checks.schedules import check_schedule, check_schedule_metric
from elasticflow.jobfile.checks.shards import check_data_shards, check_exact, check_parallel
from elasticflow.jobfile.checks.slurm import check_slurm
from elasticflow.jobfile.checks.training_length import check_intervals, samples_per_epoch
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.entry_points.object_arguments import check_free_values, check_objects, check_secrets
from elasticflow.jobfile.tables.evaluation import (
    OF_LOSS,
    MetricTable,
    evaluation_sets,
    metric_entry,
    path_of_set,
    ranking_set,
)
from elasticflow.jobfile.tables.logging import SINKS
from elasticflow.jobfile.text.layers import value_at
from elasticflow.protocol import worker_environment
from elasticflow.system.units import intervals, parse_duration, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.evaluation import EvaluationTable
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import DatasetTable
    from elasticflow.jobfile.text.source import Source

_URIS = (("snapshots", "uri"), ("model", "weights"), ("torchrun", "log_dir"))
_NO_PLACE = {  # where snapshots cannot be written, and why
    re.compile(r"(^|::)memory://", re.IGNORECASE): "is the memory of one process, and a run has several",
    re.compile(r"(^|::)https?://", re.IGNORECASE): "can only be read: http does not write",
}
# Within the grace a worker ends its step, agrees with the others, stages and commits: no machine does that faster.
_LEAST_GRACE_S = 1.0


def check_tables(source: Source, tables: ValidTables) -> list[Diagnostic]:
    """Return every problem between tables; *tables* lacks the tables that are wrong by themselves."""
    return [
        *_batch(source, tables),
        *_best(source, tables),
        *_measured(source, tables),
        *check_exact(source, tables),
        *check_parallel(source, tables),
        *check_data_shards(source, tables),
        *_sampling(source, tables),
        *check_evaluation_data(source, tables),
        *_measures(source, tables),
        *check_stop_when(source, tables),
        *_sink_options(source, tables),
        *check_schedule_metric(source, tables),
        *check_lengths(source, tables),
        *_failure_costs(source, tables),
        *_optimizer(source, tables),
        *_rendezvous(source, tables),
        *_variables(source, tables),
        *_device(source, tables),
        *_several_machines(source, tables),
        *_one_node_only(source, tables),
        *_uris(source),
        *_not_shared(source, tables),
        *check_slurm(source, tables),
        *check_free_values(source),
        *check_objects(source),
        *check_secrets(source),
    ]


def check_lengths(source: Source, tables: ValidTables) -> list[Diagnostic]:
    """Return the problems of keys that do not fit the length of training.

    Where a flag cuts training short for a trial, only errors and what the flags themselves say are returned.
    """
    problems = [*check_schedule(source, tables), *check_intervals(source, tables)]
    train = tables.get("train")
    key = "epochs" if train is None or train.steps is None else "steps"
    is_trial = not problems or source.problem("", "", ("train", key)).is_flag
    return [each for each in problems if each.severity == "error" or each.is_flag or not is_trial]


def _batch(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    dataset, nodes = tables.get("dataset"), tables.get("nodes")
    if dataset is None:
        return
    size, path = dataset.global_batch_size, ("dataset", "global_batch_size")
    if nodes is not None:
        workers, is_exact = nodes.largest_world_size
        if size < workers:
            per_node = f"{nodes.nproc_per_node} per node" if is_exact else "at least one per node"
            message = f"dataset.global_batch_size ({size}) is smaller than the largest world size ({workers})"
            remedy = (
                f"nodes.max is {nodes.max} with {per_node}, so {workers} workers may share a batch:\n"
                f"raise the batch to {workers} or more, or lower nodes.max"
            )
            yield source.problem(codes.BATCH_TOO_SMALL, message, path, remedy=remedy)
    samples = samples_per_epoch(dataset, dataset.samples)
    if samples is not None and dataset.tail == "drop" and samples < size:
        message = (
            f"no step is ever made: an epoch has {samples} samples, a batch {size}, and the tail is dropped"
        )
        yield source.problem(
            codes.NO_STEP, message, path, remedy='use a smaller batch, or tail = "spill" or "short"'
        )
    elif samples is not None and samples == dataset.samples and samples < size:
        message = (
            f"one batch of {size:,} samples is more than the whole dataset, which has {dataset.samples:,}"
        )
        remedy = f"a pass over the data is not even one step: use a batch of at most {dataset.samples:,}"
        yield source.problem(codes.BATCH_OVER_DATA, message, path, severity="warning", remedy=remedy)


def _sampling(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the keys that cannot be combined with a job's sampler or mixture."""
    dataset = tables.get("dataset")
    if dataset is None:
        return
    for key in ("sampler", "mix"):
        if getattr(dataset, key) and dataset.shards is not None:
            message = f"dataset.{key} draws samples by their numbers, and data shards are read in order"
            remedy = (
                "leave it out and let the shards' own code draw, or read the data by index: an object with __len__ and __getitem__,\n"
                "without dataset.shards"
            )
            yield _no_sampling(source, key, message, remedy)
    kind = None if dataset.sampler is None else dataset.sampler.kind
    if dataset.mix:
        yield from _mixture(source, dataset, kind)
    elif kind == "temperature":
        message = (
            "dataset.sampler.temperature shares samples out among the sets of a mixture, and there is one set"
        )
        remedy = "leave it out, or name several sets: [[dataset.mix]] with an entry each"
        yield _no_sampling(source, "sampler", message, remedy)


def _mixture(source: Source, dataset: DatasetTable, kind: str | None) -> Iterator[Diagnostic]:
    if dataset.args:
        message = "dataset.args belong to dataset.entry, and each set of dataset.mix has args of its own"
        yield _no_sampling(source, "args", message, "move them into the tables of [[dataset.mix]]")
    if kind not in (None, "temperature"):
        message = f"dataset.sampler.{kind} goes by the samples of one set, and dataset.mix names several"
        remedy = (
            "leave it out; or return all sets as one from a function of your own (torch.utils.data.ConcatDataset), as dataset.entry,\n"
            f"with {kind} for the samples of all"
        )
        yield _no_sampling(source, "sampler", message, remedy)
    without = [number for number, each in enumerate(dataset.mix) if each.weight is None]
    if kind == "temperature" and len(without) < len(dataset.mix):
        number = next(number for number, each in enumerate(dataset.mix) if each.weight is not None)
        message = "dataset.sampler.temperature makes the sets' shares of their sizes, and a set has a weight of its own"
        path = ("dataset", "mix", number, "weight")
        yield source.problem(codes.SAMPLER, message, path, remedy="keep the weights, or the temperature")
    elif 0 < len(without) < len(dataset.mix):
        message = f"dataset.mix[{without[0]}] has no weight, and other sets have one"
        remedy = "give every set a weight, or none: then each is drawn by its size"
        yield source.problem(codes.SAMPLER, message, ("dataset", "mix", without[0]), remedy=remedy)


def _no_sampling(source: Source, key: str, message: str, remedy: str) -> Diagnostic:
    return source.problem(codes.SAMPLER, message, ("dataset", key), at_key=True, remedy=remedy)


def _best(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    snapshots = tables.get("snapshots")
    if snapshots is None or snapshots.keep.best is None or "evaluation" not in tables:
        return
    evaluation, path = tables["evaluation"], ("snapshots", "keep", "best")
    sets = evaluation_sets(evaluation)
    if evaluation is None:
        message = "snapshots.keep.best needs to know what is best, and there is no [evaluation]"
        remedy = 'add [evaluation] with best = "max accuracy", or leave keep.best out'
        yield source.problem(codes.NO_METRIC, message, path, remedy=remedy)
    elif sets and ranking_set(evaluation) is None:
        name, first = next(iter(sets.items()))
        given = "no evaluation set has a `best`" if name else "evaluation.best is not given"
        message = f"snapshots.keep.best needs to know what is best, and {given}"
        names = sorted(first.measured)
        example = f"max {names[0]}" if names and names != ["loss"] else "min loss"
        remedy = f'add to [{dotted(path_of_set(name))}]: best = "{example}"'
        yield source.problem(codes.NO_METRIC, message, path, remedy=remedy)


def _measured(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    train, best_of = tables.get("train"), ""
    for name, table in evaluation_sets(tables.get("evaluation")).items():
        path = path_of_set(name)
        if table.step is not None and not table.metrics:
            message = (
                f"{dotted(path)} measures nothing: it has no metrics, and with a step of its own no loss"
            )
            remedy = 'add metrics = { NAME = "module:function" }, called with what the step returns; or leave step out'
            yield source.problem(codes.MISSING, message, (*path, "step"), remedy=remedy)
        elif table.step is not None:
            yield from _without_loss(source, path, table)
        elif "loss" in table.metrics:
            message = (
                f"{dotted(path)}.metrics has a metric named `loss`, which every evaluation measures already"
            )
            remedy = "leave it out: `loss` is what the training step gives, as a mean over the whole set; or give it another name"
            yield source.problem(codes.LOSS_TWICE, message, (*path, "metrics", "loss"), remedy=remedy)
        if table.weights in {"ema", "both"} and train is not None and train.ema is None:
            message = f'{dotted(path)}.weights = "{table.weights}" measures averaged weights, and train.ema is not given'
            remedy = f"add to [train]: ema = 0.999; or leave {dotted(path)}.weights out"
            yield source.problem(codes.NO_AVERAGE, message, (*path, "weights"), remedy=remedy)
        names = sorted(table.measured)
        if table.best is not None and table.best.split()[1] not in names:
            side, metric = table.best.split()
            near = nearest(metric, names)
            message = f'{dotted(path)}.best = "{table.best}" names no metric: there are {", ".join(names) or "none"}'
            meant = f'did you mean "{side} {near[0]}"?' if near else None
            yield source.problem(codes.NO_METRIC, message, (*path, "best"), remedy=meant)
        if table.best is not None and best_of:
            message = f"{dotted(path)}.best: snapshots are ranked by one metric, and {best_of}.best names one already"
            yield source.problem(
                codes.EVALUATION_SETS, message, (*path, "best"), remedy="leave one of them out"
            )
        elif table.best is not None:
            best_of = dotted(path)


def _without_loss(source: Source, path: KeyPath, table: EvaluationTable) -> Iterator[Diagnostic]:
    """Yield the metrics that follow from a loss, where the evaluation has a step of its own."""
    for name, metric in table.metrics.items():
        is_of_loss = isinstance(metric, MetricTable) and metric.over == "loss"
        if is_of_loss or metric_entry(metric).startswith(OF_LOSS):
            message = (
                f"{dotted(path)}.metrics.{name} follows from the loss, and {dotted(path)}.step measures none"
            )
            remedy = "name a function of (outputs, targets), or leave step out"
            yield source.problem(codes.EXCLUSIVE, message, (*path, "metrics", name), remedy=remedy)


def _optimizer(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    optimizer = tables.get("optimizer")
    if optimizer is not None and re.fullmatch(r"torch\.optim(\.lbfgs)?:LBFGS", optimizer.entry):
        message = "LBFGS evaluates the loss several times within a step, and a step has one gradient here"
        remedy = "use an optimizer of one gradient per step, such as torch.optim:AdamW"
        yield source.problem(codes.NEEDS_CLOSURE, message, ("optimizer", "entry"), remedy=remedy)


def _rendezvous(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    nodes, torchrun = tables.get("nodes"), tables.get("torchrun")
    if nodes is None or torchrun is None:
        return
    backend, path = torchrun.rdzv_backend, ("torchrun", "rdzv_backend")
    if backend == "static" and nodes.min != nodes.max:
        message = f'"static" needs a fixed number of nodes, and they are {nodes.min} to {nodes.max}'
        remedy = "set nodes.min and nodes.max to the same number, or use c10d"
        yield source.problem(codes.RENDEZVOUS, message, path, remedy=remedy)
    if nodes.endpoint is None and (backend != "c10d" or torchrun.is_store_outside):
        what, path = (
            (f'"{backend}"', path) if backend != "c10d" else ("is_host = false", ("torchrun", "rdzv_conf"))
        )
        message = f"{what} needs to know where the rendezvous is, and nodes.endpoint is not given"
        remedy = 'add to [nodes]: endpoint = "host:port"'
        yield source.problem(codes.RENDEZVOUS, message, path, remedy=remedy)


def _variables(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield variables of [env] that another key sets."""
    nodes, train, env = tables.get("nodes"), tables.get("train"), tables.get("env")
    own = {} if env is None else env.values()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in own and nodes is not None and nodes.interface is not None:
            message = f"env.{name} and nodes.interface exclude each other"
            yield source.problem(
                codes.EXCLUSIVE, message, ("env", name), remedy="keep one: nodes.interface sets it"
            )
    name = worker_environment.CUBLAS_WORKSPACE_CONFIG
    if name in own and train is not None and train.consistency == "exact":
        message = f'env.{name} and train.consistency = "exact" exclude each other'
        value = worker_environment.CUBLAS_WORKSPACE
        remedy = (
            f"leave it out: exact mode sets {value}, without which cuBLAS may add in another order each time"
        )
        yield source.problem(codes.EXCLUSIVE, message, ("env", name), remedy=remedy)


def _device(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a worker for each GPU, where all are to train on the CPU, and what torch has for CUDA alone."""
    nodes, ddp = tables.get("nodes"), tables.get("ddp")
    if nodes is not None and ddp is not None and ddp.sync_batchnorm and nodes.device not in {"auto", "cuda"}:
        message = f"ddp.sync_batchnorm needs CUDA, and nodes.device is {show(nodes.device)}"
        remedy = (
            'leave it out; with train.consistency = "exact" running statistics are the mean over all shards'
        )
        yield source.problem(codes.EXCLUSIVE, message, ("ddp", "sync_batchnorm"), remedy=remedy)
    if nodes is not None and nodes.nproc_per_node == "gpu" and nodes.device == "cpu":
        message = 'nodes.nproc_per_node = "gpu" and nodes.device = "cpu" exclude each other'
        remedy = (
            'nodes.device = "cuda" trains on GPUs; nodes.nproc_per_node = "cpu" starts a worker for each core'
        )
        yield source.problem(codes.EXCLUSIVE, message, ("nodes", "nproc_per_node"), remedy=remedy)


def _several_machines(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    nodes, snapshots = tables.get("nodes"), tables.get("snapshots")
    if nodes is None or "slurm" in source.raw:  # its script says where nodes meet, in a shared folder
        return
    # A manifest for Kubernetes says where the pods meet.
    if nodes.max > 1 and nodes.endpoint is None and "kubernetes" not in source.raw:
        message = f"nodes.max is {nodes.max}, but without nodes.endpoint no second machine can join"
        remedy = (
            'add to [nodes]: endpoint = "host:29400" (the first machine), if there is more than one machine'
        )
        yield source.problem(codes.NO_ENDPOINT, message, ("nodes", "max"), severity="warning", remedy=remedy)
    if nodes.endpoint is not None and nodes.max > 1 and snapshots is not None and _is_local(snapshots.uri):
        where = "in the run folder" if snapshots.uri is None else f"at {show(snapshots.uri)}"
        message = f"snapshots are kept {where}: every machine must see the same folder there"
        remedy = 'set snapshots.uri to an object store ("s3://bucket/name") or to a shared file system'
        path = ("snapshots", "uri") if snapshots.uri is not None else ("nodes", "endpoint")
        yield source.problem(codes.LOCAL_SNAPSHOTS, message, path, severity="warning", remedy=remedy)


def _one_node_only(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    nodes, snapshots = tables.get("nodes"), tables.get("snapshots")
    if nodes is None or snapshots is None or not snapshots.settings().is_held_at_interval:
        return
    if nodes.max > 1:
        message = f"snapshots.memory at an interval covers one node, and nodes.max is {nodes.max}"
        remedy = (
            "leave it out: each node then holds the state by itself; with an interval, a crash goes back to the\n"
            "newest snapshot on the store while workers are on several nodes"
        )
        path = ("snapshots", "memory")
        yield source.problem(codes.ONE_NODE_ONLY, message, path, severity="warning", remedy=remedy)


def _uris(source: Source) -> list[Diagnostic]:
    if all(value_at(path, source.raw) is None for path in _URIS):
        return []
    from elasticflow.jobfile.checks.uris import check_uris  # most jobs keep their snapshots in the run folder

    return [*check_uris(source, _URIS)]


def _not_shared(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    snapshots = tables.get("snapshots")
    uri = "" if snapshots is None else snapshots.uri or ""
    for kind, why in _NO_PLACE.items():
        if kind.search(uri):
            remedy = "leave uri out (snapshots go to the run folder), or name a folder or an object store"
            yield source.problem(
                codes.NOT_SHARED, f"snapshots.uri {why}", ("snapshots", "uri"), remedy=remedy
            )


def _is_local(uri: str | None) -> bool:
    return uri is None or "://" not in uri or uri.startswith(("file://", "local://"))


def _failure_costs(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning for a grace too short for a snapshot, and for a budget that refills faster than snapshots come."""
    snapshots, restarts = tables.get("snapshots"), tables.get("restarts")
    if snapshots is None:
        return
    if parse_duration(snapshots.grace) < _LEAST_GRACE_S:
        message = f'snapshots.grace is "{snapshots.grace}": a preempted worker has no time to take a snapshot'
        remedy = (
            "a step must end and a snapshot be written in this time: set the time between the signal and the kill,\n"
            "such as Slurm's KillWait (30 s) or Kubernetes' terminationGracePeriodSeconds (30 s)"
        )
        yield source.problem(
            codes.SHORT_GRACE, message, ("snapshots", "grace"), severity="warning", remedy=remedy
        )
    if restarts is not None and restarts.refill is not None:
        yield from _refill(source, restarts.refill, snapshots.every)


def _refill(source: Source, refill: str, every: str | list[str]) -> Iterator[Diagnostic]:
    """Yield a warning for a refill by time that is shorter than the time between snapshots.

    Time passes even if training makes no progress; a refill after steps or epochs needs progress.
    """
    due = [parse_interval(text) for text in intervals(every)]
    if parse_interval(refill).unit != "s" or any(interval.unit != "s" for interval in due):
        return
    first = min(due)
    if parse_interval(refill).amount < first.amount:
        message = f'restarts.refill ("{refill}") is shorter than the time between snapshots ({first})'
        remedy = (
            "a job that fails between the two goes back to the same snapshot for ever, and the budget never stops it:\n"
            'take snapshots more often, or refill by progress, such as "1000 steps"'
        )
        yield source.problem(
            codes.ENDLESS_REFILL, message, ("restarts", "refill"), severity="warning", remedy=remedy
        )


def check_program(source: Source, tables: ValidTables, root: Path) -> Iterator[Diagnostic]:
    """Yield a warning if notify.command names a program that this machine does not have; *root*: folder of the project."""
    notify = tables.get("notify")
    if notify is None or notify.command is None:
        return
    program, path = notify.command[0], ("notify", "command", 0)
    if "/" in program:
        is_there = shutil.which(root / program) is not None
        remedy = "a relative path starts at the project root; the file must be executable (chmod +x)"
    else:
        is_there = shutil.which(program) is not None
        remedy = "install it where the job runs"
        if (root / program).is_file():
            remedy = f"a file of the project is named with its folder: {show(f'./{program}')}"
    if not is_there:
        message = f"notify.command: there is no program {show(program)} here"
        yield source.problem(codes.NO_PROGRAM, message, path, severity="warning", remedy=remedy)


def _sink_options(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning for each table of options whose sink is not chosen."""
    logging = tables.get("logging")
    if logging is None or len(source.layers) > 1:
        return  # a base may hold options for jobs that choose the sink; a case or a flag may choose other sinks for once
    for name in SINKS:
        if getattr(logging, name) is not None and name not in logging.sinks:
            message = f"[logging.{name}] has no effect: logging.sinks does not have {show(name)}"
            sinks = ", ".join(show(each) for each in [*logging.sinks, name])
            remedy = f"add to [logging]: sinks = [{sinks}]; or leave the table out"
            path = ("logging", name)
            yield source.problem(
                codes.UNUSED_OPTIONS, message, path, at_key=True, severity="warning", remedy=remedy
            )


def _measures(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of the keys that model FLOPs utilization (MFU) needs."""
    model, logging = tables.get("model"), tables.get("logging")
    if model is None or logging is None:
        return
    if logging.peak_flops is not None and model.flops_per_sample is None:
        message = "logging.peak_flops is a part of MFU, which needs model.flops_per_sample"
        remedy = (
            "say how many floating-point operations training on one sample takes, forward and backward: "
            "of a transformer, some 6 x parameters x tokens"
        )
        yield source.problem(codes.MISSING, message, ("logging", "peak_flops"), remedy=remedy)
