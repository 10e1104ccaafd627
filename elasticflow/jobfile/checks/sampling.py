"""The other keys that `dataset.sampler`, `dataset.mix` and `dataset.shards` need or rule out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.exact import nearest_divisors, too_few_shards
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import DatasetTable
    from elasticflow.jobfile.text.source import Source

_SHARDS = ("dataset", "shards")


def check_sampling(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
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
            yield _problem(source, key, message, remedy)
    kind = None if dataset.sampler is None else dataset.sampler.kind
    if dataset.mix:
        yield from _mixture(source, dataset, kind)
    elif kind == "temperature":
        message = (
            "dataset.sampler.temperature shares samples out among the sets of a mixture, and there is one set"
        )
        remedy = "leave it out, or name several sets: [[dataset.mix]] with an entry each"
        yield _problem(source, "sampler", message, remedy)


def _mixture(source: Source, dataset: DatasetTable, kind: str | None) -> Iterator[Diagnostic]:
    if dataset.args:
        message = "dataset.args belong to dataset.entry, and each set of dataset.mix has args of its own"
        yield _problem(source, "args", message, "move them into the tables of [[dataset.mix]]")
    if kind not in (None, "temperature"):
        message = f"dataset.sampler.{kind} goes by the samples of one set, and dataset.mix names several"
        remedy = (
            "leave it out; or return all sets as one from a function of your own (torch.utils.data.ConcatDataset), as dataset.entry,\n"
            f"with {kind} for the samples of all"
        )
        yield _problem(source, "sampler", message, remedy)
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


def _problem(source: Source, key: str, message: str, remedy: str) -> Diagnostic:
    return source.problem(codes.SAMPLER, message, ("dataset", key), at_key=True, remedy=remedy)


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
