"""The keys of other tables that `[parallel]` needs or rules out."""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.exact import options_of_ddp
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.tables.parallel import MOST_DEGREE
from elasticflow.protocol.shard_groups import node_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.launching import NodesTable
    from elasticflow.jobfile.text.source import Source

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
