"""The calls that make a job's training data, the order of its samples, and its loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.factories import collator, partial_of, sampler_values, values_of_data
from elasticflow.compiler.entry_point.source_code import Call, Code, Name, call, keywords, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.compiler.entry_point.imports import Imports
    from elasticflow.jobfile.tables.job import EvaluationTable, Job


def data(job: Job, dataset: Call, imports: Imports) -> dict[str, Code | None]:
    """Return the calls that open the dataset, order its samples, and make the batches."""
    order = None if job.dataset.shards is not None else _order(job, imports)
    small = job.dataset.micro_batch_size is not None
    options = {
        "size": "GLOBAL_BATCH_SIZE",
        **({"epochs": "EPOCHS"} if job.train.epochs is not None else {"steps": "STEPS"}),
        "tail": "TAIL",
        "num_workers": "NUM_WORKERS",
        **({"micro_batch_size": "MICRO_BATCH_SIZE"} if small else {}),
        **({} if order is None else {"order": "order"}),
        **({} if job.dataset.shards is None else {"shards": "SHARDS"}),
    }
    named = {key: Name(name) for key, name in options.items()}
    batches = call("run.batches", "dataset", **named, **collate(job, imports))
    if job.dataset.shards is not None:
        build = partial_of(imports, dataset) if dataset.arguments else dataset.name
        made = call("open_shards", "worker", build, quoted("train"), "SHARDS")
        return {"order": None, "dataset": made, "batches": batches}
    given: dict[str, Any] = {} if job.dataset.samples is None else {"samples": job.dataset.samples}
    given |= {"values": names} if (names := values_of_data(job)) else {}
    return {"dataset": opened(dataset, "train", given), "order": order, "batches": batches}


def _order(job: Job, imports: Imports) -> Call | None:
    """Return what makes the order of samples; None for that of every job that does not say otherwise."""
    sampler, sets = job.dataset.sampler, job.dataset.mix
    if sets:
        weights = [each.weight for each in sets if each.weight is not None]
        shares: dict[str, Any] = {"weights": weights} if weights else {}
        if sampler is not None:
            shares = {"temperature": sampler.temperature}
        return call("samplers.mix", "worker", "dataset", **shares)
    if sampler is None:
        return None
    values = sampler_values(sampler, imports)
    if sampler.kind == "bucket_by":
        return call(
            "samplers.bucket_by_length", "worker", "dataset", values, "GLOBAL_BATCH_SIZE", tail=Name("TAIL")
        )
    make = {"weights": "samplers.draw_by_weight", "balance_by": "samplers.draw_by_class"}[sampler.kind]
    draws = {} if sampler.draws is None else {"draws": sampler.draws}
    return call(make, "worker", "dataset", values, **draws)


def opened(dataset: Call, name: str, options: Mapping[str, Any]) -> Call:
    """Return the call that opens the data set called *name*, made by *dataset*."""
    arguments = (("", "worker"), ("lambda: ", dataset), ("", quoted(name)))
    return Call("open_dataset", (*arguments, *keywords(options, name)))


def collate(job: Job, imports: Imports) -> dict[str, Name]:
    """Return the argument that says how training samples become a batch; none where that is torch's way."""
    match job.dataset.collate:
        case None:
            return {}
        case str(entry):
            return {"collate": Name(imports.name_of(entry))}
        case _:
            return {"collate": Name("collator")}


def collate_of_set(job: Job, table: EvaluationTable, imports: Imports, where: str) -> dict[str, Any]:
    """Return the argument that says how samples of an evaluation set, whose table is *where*, become a batch."""
    match table.collate:
        case None:
            return collate(job, imports)
        case str(entry):
            return {"collate": Name(imports.name_of(entry))}
        case own:
            return {"collate": collator(own, imports, f"{where}.collate")}
