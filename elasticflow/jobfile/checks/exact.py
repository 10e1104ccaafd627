"""The keys of other tables that `train.consistency = "exact"` needs or rules out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.types import MOST_NODES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.launching import NodesTable
    from elasticflow.jobfile.tables.training import DatasetTable, DdpTable
    from elasticflow.jobfile.text.source import Source

_SHARDS = ("train", "virtual_shards")


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
