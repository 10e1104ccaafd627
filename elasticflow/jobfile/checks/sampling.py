"""The other keys that `dataset.sampler` and `dataset.mix` need or rule out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import DatasetTable, ValidTables
    from elasticflow.jobfile.text.source import Source


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
