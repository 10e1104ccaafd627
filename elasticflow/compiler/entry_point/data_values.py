"""How the entry point opens, orders and reads its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.source_code import Name, call, quoted

if TYPE_CHECKING:
    from elasticflow.compiler.entry_point.factories import Line
    from elasticflow.jobfile.tables.job import Job


def reading(job: Job, length: dict[str, Name], collate: dict[str, Name]) -> dict[str, Line]:
    """Return the calls that make dataset, schedule and loader; *length* and *collate* are arguments of theirs."""
    return (_by_index if job.dataset.shards is None else _by_shard)(job, length, collate)


def _by_index(job: Job, length: dict[str, Name], collate: dict[str, Name]) -> dict[str, Line]:
    """How a map-style dataset is opened, ordered and read."""
    samples = {} if job.dataset.samples is None else {"samples": job.dataset.samples}
    shards = {"virtual_shards": Name("VIRTUAL_SHARDS")} if job.train.consistency == "exact" else {}
    ordered = {**length, "tail": Name("TAIL"), "seed": Name("SEED")}
    read = {"num_workers": Name("NUM_WORKERS"), **collate, **shards}
    return {
        "dataset.open": (
            "dataset = ",
            call("index_loader.open_dataset", "me", "build_dataset", quoted("train"), **samples),
        ),
        "schedule": (
            "schedule = ",
            call("index_schedule.IndexSchedule", "len(dataset)", "GLOBAL_BATCH_SIZE", **ordered),
        ),
        "loader": (
            "loader = ",
            call("index_loader.IndexLoader", "me", "dataset", "schedule", "MICRO_BATCH_SIZE", **read),
        ),
    }


def _by_shard(job: Job, length: dict[str, Name], collate: dict[str, Name]) -> dict[str, Line]:
    """The same for data shards."""
    shards = {"virtual_shards": Name("VIRTUAL_SHARDS")} if job.train.consistency == "exact" else {}
    ordered = {**length, "tail": Name("TAIL"), **shards}
    read = {"num_workers": Name("NUM_WORKERS"), **collate, **shards}
    return {
        "dataset.open": (
            "dataset = ",
            call("shard_loader.open_shards", "me", "build_dataset", quoted("train"), "SHARDS"),
        ),
        "schedule": (
            "schedule = ",
            call("shard_schedule.ShardSchedule", "SHARDS", "GLOBAL_BATCH_SIZE", **ordered),
        ),
        "loader": (
            "loader = ",
            call("shard_loader.ShardLoader", "me", "dataset", "schedule", "MICRO_BATCH_SIZE", **read),
        ),
    }
