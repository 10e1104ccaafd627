"""What `dataset.sampler` needs of the other keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source


def check_sampling(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield what a job's sampler cannot be combined with."""
    dataset = tables.get("dataset")
    if dataset is None:
        return
    if dataset.sampler is not None and dataset.shards is not None:
        message = "dataset.sampler draws samples by their numbers, and data shards are read in order"
        remedy = (
            "leave it out and let the shards' own code draw, or read the data by index: an object with __len__ and __getitem__,\n"
            "without dataset.shards"
        )
        yield source.problem(codes.SAMPLER, message, ("dataset", "sampler"), at_key=True, remedy=remedy)
