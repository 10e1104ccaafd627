"""The other keys that `dataset.shards`, data that can only be read in order, needs or rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.exact import nearest_divisors, too_few_shards
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source

_SHARDS = ("dataset", "shards")


def check_data_shards(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a job's data shards, and the promises that do not hold for them."""
    dataset = tables.get("dataset")
    if dataset is None or dataset.shards is None:
        return
    train = tables.get("train")
    why, nodes = "every worker reads whole shards", tables.get("nodes")
    yield from too_few_shards(source, codes.DATA_SHARDS, _SHARDS, dataset.shards, nodes, why)
    yield from _batch(source, dataset.shards, dataset.global_batch_size)
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
        yield source.problem(codes.DATA_SHARDS, message, _SHARDS, remedy=remedy)
    yield _promise(source, is_exact=train is not None and train.consistency == "exact")


def _batch(source: Source, shards: int, size: int) -> Iterator[Diagnostic]:
    if size % shards:
        message = f"dataset.global_batch_size ({size}) is not a multiple of dataset.shards ({shards})"
        rounded = max(1, round(size / shards)) * shards
        remedy = f"a step takes equally much of every shard: use shards = {nearest_divisors(size, shards)}, or a batch of {rounded}"
        yield source.problem(codes.DATA_SHARDS, message, _SHARDS, remedy=remedy)


def _promise(source: Source, *, is_exact: bool) -> Diagnostic:
    what = "the same bits at any world size" if is_exact else "every sample once"
    message = f"{what}, if every data shard yields the same each time it is read: --deep looks at the first samples of one"
    remedy = (
        "give each shard an order of its own (sorted files, no threads that race).\n"
        "A run that continues reads the shards anew up to where it was, unless they have a method skip(n)"
    )
    if is_exact:
        remedy += ".\nWhere a virtual shard's data is used up before that of others, batches are smaller until the epoch ends"
    return source.problem(codes.NOT_CHECKED, message, _SHARDS, severity="note", remedy=remedy)
