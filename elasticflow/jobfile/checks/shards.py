"""Shards: virtual shards of a batch (`train.consistency = "exact"`), of the data, and of a model ([parallel])."""

from __future__ import annotations

import math
import re
from itertools import chain, islice
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.tables.parallel import MOST_DEGREE
from elasticflow.jobfile.tables.types import MOST_NODES
from elasticflow.protocol.shard_groups import node_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.launching import NodesTable
    from elasticflow.jobfile.tables.training import DatasetTable, DdpTable
    from elasticflow.jobfile.text.source import Source

_SHARDS, _DATA_SHARDS = ("train", "virtual_shards"), ("dataset", "shards")


def check_exact(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a job's virtual shards."""
    train, dataset = tables.get("train"), tables.get("dataset")
    nodes, ddp = tables.get("nodes"), tables.get("ddp")
    if train is None:
        return
    if train.consistency != "exact":
        if train.virtual_shards is not None:
            message = 'train.virtual_shards belongs to train.consistency = "exact"'
            remedy = 'leave it out, or add consistency = "exact"'
            yield source.problem(codes.VIRTUAL_SHARDS, message, _SHARDS, remedy=remedy)
        return
    if train.virtual_shards is None:
        message = 'train.consistency = "exact" needs train.virtual_shards'
        remedy = "set it to the most workers the job will ever have, or more: it cannot change during a run"
        yield source.problem(codes.VIRTUAL_SHARDS, message, ("train", "consistency"), remedy=remedy)
    else:
        why = "every worker needs a shard"
        yield from too_few_shards(source, codes.VIRTUAL_SHARDS, _SHARDS, train.virtual_shards, nodes, why)
        yield from _batch(source, train.virtual_shards, dataset, nodes)
    yield from options_of_ddp(source, codes.VIRTUAL_SHARDS, ddp, 'consistency = "exact"')


def options_of_ddp(source: Source, code: str, ddp: DdpTable | None, without: str) -> Iterator[Diagnostic]:
    """Yield an error for each option in [ddp], of which the part of the job named *without* makes no use."""
    for key, value in ddp or ():
        if value not in (None, False):
            message = f"ddp.{key} is an option of DistributedDataParallel, which {without} does without"
            remedy = "leave it out"
            if key == "sync_batchnorm":
                remedy += ": running statistics are the mean over all shards anyway"
            yield source.problem(code, message, ("ddp", key), remedy=remedy)


def too_few_shards(
    source: Source, code: str, path: KeyPath, shards: int, nodes: NodesTable | None, why: str
) -> Iterator[Diagnostic]:
    """Yield an error if the key at *path* gives fewer shards than there may be workers."""
    if nodes is None:
        return
    workers, is_exact = nodes.largest_world_size
    if shards < workers:
        message = f"{dotted(path)} ({shards}) is smaller than the largest world size ({workers}{'' if is_exact else ' or more'})"
        remedy = f"{why}: set {path[-1]} to {workers} or more, or lower nodes.max"
        yield source.problem(code, message, path, remedy=remedy)


def _batch(
    source: Source, shards: int, dataset: DatasetTable | None, nodes: NodesTable | None
) -> Iterator[Diagnostic]:
    if dataset is None:
        return
    size, micro = dataset.global_batch_size, dataset.micro_batch_size
    if size % shards:
        message = f"dataset.global_batch_size ({size}) cannot be cut into {shards} equal shards"
        fewest = 1 if nodes is None else nodes.largest_world_size[0]  # each worker needs one
        batches = " or ".join(
            str(each) for each in (size // shards * shards, -(-size // shards) * shards) if each
        )
        remedy = f"use a batch of {batches}"
        if near := nearest_divisors(size, shards, fewest):
            remedy = f"use virtual_shards = {near}, or a batch of {batches}"
        yield source.problem(codes.VIRTUAL_SHARDS, message, _SHARDS, remedy=remedy)
    elif micro is not None and micro < size // shards:
        message = (
            f"dataset.micro_batch_size ({micro}) is smaller than a virtual shard ({size // shards} samples)"
        )
        shards = min(d for d in _divisors(size) if d >= -(-size // micro))
        remedy = f'with "exact" a shard is one forward: use virtual_shards = {shards}, or leave micro_batch_size out'
        yield source.problem(codes.VIRTUAL_SHARDS, message, ("dataset", "micro_batch_size"), remedy=remedy)


def nearest_divisors(size: int, shards: int, fewest: int = 1) -> str:
    """Return the divisors of *size* next to *shards* that are at least *fewest*; empty if no number of shards is one."""
    divisors = {d for d in _divisors(size) if fewest <= d <= MOST_NODES}
    below = max((d for d in divisors if d < shards), default=0)
    above = min((d for d in divisors if d > shards), default=0)
    return " or ".join(str(d) for d in (below, above) if d)


def _divisors(size: int) -> set[int]:
    # Batches have at most 10^9 samples: some 30,000 trials.
    return {d for n in range(1, math.isqrt(size) + 1) if size % n == 0 for d in (n, size // n)}


# LBFGS is refused with and without shards.
_NOT_ELEMENTWISE = re.compile(r"torch\.optim(\._?\w+)?:(Adafactor|Muon|SparseAdam)")
_MOST_NAMED = 6


def check_parallel(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield what cannot be combined with a sharded model, and a degree for which no group of workers can be formed."""
    parallel, nodes = tables.get("parallel"), tables.get("nodes")
    if parallel is None:
        return
    if isinstance(parallel.shard, int) and nodes is not None:
        yield from _worlds(source, parallel.shard, nodes)
    yield from _training(source, tables)
    model = tables.get("model")
    if parallel.init == "meta" and model is not None and model.weights is not None:
        message = 'parallel.init = "meta" is for models that no worker can hold whole, and model.weights is read whole by each'
        yield source.problem(codes.PARALLEL, message, ("parallel", "init"), remedy="leave init out")
    yield from _optimizer(source, tables)


def _worlds(source: Source, shard: int, nodes: NodesTable) -> Iterator[Diagnostic]:
    """Yield an error if no number of nodes has workers that can be cut into groups of *shard*."""
    low, high, per_node = nodes.min, nodes.max, nodes.nproc_per_node
    if not isinstance(per_node, int) or node_counts(shard, low, high, per_node):
        return
    worlds = f"{high * per_node}" if low == high else f"{low * per_node} to {high * per_node}"
    each = "" if low == high == 1 else f" ({per_node} on each node)"
    message = f"no number of workers that the job may have is divisible by parallel.shard ({shard}): they are {worlds}{each}"
    largest = min(high * per_node, MOST_DEGREE)
    sides = range(min(shard - 1, largest), 0, -1), range(shard + 1, min(2 * shard, largest) + 1)
    fitting = [(each for each in side if node_counts(each, low, high, per_node)) for side in sides]
    near = sorted(chain(*(islice(side, _MOST_NAMED) for side in fitting)), key=lambda each: abs(each - shard))
    named = ", ".join(map(str, sorted(near[:_MOST_NAMED])))
    remedy = (
        f"use a shard that divides one of them, such as {named}; or change nodes.max or nodes.nproc_per_node"
    )
    yield source.problem(codes.PARALLEL, message, ("parallel", "shard"), remedy=remedy)


def _training(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    train = tables.get("train")
    if train is None:
        return
    if train.consistency != "exact":
        yield from options_of_ddp(source, codes.PARALLEL, tables.get("ddp"), "[parallel]")
    if train.precision == "fp16":
        message = 'train.precision = "fp16" scales losses by one factor, and looks for infinities in each worker\'s rows alone'
        yield source.problem(
            codes.PARALLEL, message, ("train", "precision"), remedy='use precision = "bf16", or "fp32"'
        )
    dataset = tables.get("dataset")
    if dataset is not None and dataset.shards is not None:
        message = "dataset.shards reads data in order, and workers that share a model read samples by index"
        yield source.problem(
            codes.PARALLEL, message, ("dataset", "shards"), remedy="use a map-style dataset, without shards"
        )
    if train.compile:
        message = "train.compile compiles the whole model, and [parallel] gathers and frees it block by block"
        remedy = "leave it out, and compile the blocks where the model is made: `for block in blocks: block.compile()`"
        yield source.problem(codes.PARALLEL, message, ("train", "compile"), remedy=remedy)
    if train.channels_last:
        message = "train.channels_last orders weights in a way in which [parallel] cannot cut them into rows"
        yield source.problem(codes.PARALLEL, message, ("train", "channels_last"), remedy="leave it out")


def _optimizer(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    optimizer, train = tables.get("optimizer"), tables.get("train")
    if optimizer is None:
        return
    if (found := _NOT_ELEMENTWISE.fullmatch(optimizer.entry)) is not None:
        message = f"{found[2]} does not treat each element of a parameter by itself, and [parallel] gives each worker some rows of it"
        remedy = "use an elementwise optimizer, such as torch.optim:AdamW"
        yield source.problem(codes.PARALLEL, message, ("optimizer", "entry"), remedy=remedy)
    if train is not None and train.consistency == "exact" and optimizer.args.get("fused") is True:
        message = f"optimizer.args.fused = {show(value=True)} rounds the last elements of a part in another way than those within it"
        remedy = 'leave it out: consistency = "exact" promises the same bits however the model is cut'
        yield source.problem(codes.PARALLEL, message, ("optimizer", "args", "fused"), remedy=remedy)


def check_data_shards(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a job's data shards, and the promises that do not hold for them."""
    dataset = tables.get("dataset")
    if dataset is None or dataset.shards is None:
        return
    train = tables.get("train")
    why, nodes = "every worker reads whole shards", tables.get("nodes")
    yield from too_few_shards(source, codes.DATA_SHARDS, _DATA_SHARDS, dataset.shards, nodes, why)
    yield from _data_batch(source, dataset.shards, dataset.global_batch_size)
    if dataset.tail == "drop":
        message = 'dataset.tail = "drop" needs the length of the data, which data shards do not tell'
        remedy = 'use "spill" (the last batch of an epoch continues in the next one) or "short"'
        yield source.problem(codes.DATA_SHARDS, message, ("dataset", "tail"), remedy=remedy)
    if dataset.samples is not None:
        message = (
            "dataset.samples is the length of data that is read by index, and data shards do not tell theirs"
        )
        yield source.problem(codes.DATA_SHARDS, message, ("dataset", "samples"), remedy="leave it out")
    if train is not None and train.virtual_shards is not None and dataset.shards % train.virtual_shards:
        message = f"dataset.shards ({dataset.shards}) is not a multiple of train.virtual_shards ({train.virtual_shards})"
        shards = -(-dataset.shards // train.virtual_shards) * train.virtual_shards
        remedy = f"each virtual shard reads its own data shards: use shards = {shards}"
        yield source.problem(codes.DATA_SHARDS, message, _DATA_SHARDS, remedy=remedy)
    yield _promise(source, is_exact=train is not None and train.consistency == "exact")


def _data_batch(source: Source, shards: int, size: int) -> Iterator[Diagnostic]:
    if size % shards:
        message = f"dataset.global_batch_size ({size}) is not a multiple of dataset.shards ({shards})"
        rounded = max(1, round(size / shards)) * shards
        remedy = f"a step takes equally much of every shard: use shards = {nearest_divisors(size, shards)}, or a batch of {rounded}"
        yield source.problem(codes.DATA_SHARDS, message, _DATA_SHARDS, remedy=remedy)


def _promise(source: Source, *, is_exact: bool) -> Diagnostic:
    what = "the same bits at any world size" if is_exact else "every sample once"
    message = f"{what}, if every data shard yields the same each time it is read: --deep looks at the first samples of one"
    remedy = (
        "give each shard an order of its own (sorted files, no threads that race).\n"
        "A run that continues reads the shards anew up to where it was, unless they have a method skip(n)"
    )
    if is_exact:
        remedy += ".\nWhere a virtual shard's data is used up before that of others, batches are smaller until the epoch ends"
    return source.problem(codes.NOT_CHECKED, message, _DATA_SHARDS, severity="note", remedy=remedy)
