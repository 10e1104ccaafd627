"""Batches and how their samples are drawn, in words, for `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from elasticflow.compiler.plan.forecast import Knowledge, Known
    from elasticflow.jobfile.tables.job import Job


def by(known: Known) -> str:
    """Return where a fact is known from, ` (run 20261120-104500-4f2a)`; nothing if the job file says it."""
    return "" if known.source == "dataset.samples" else f" ({known.source})"


def batch_in_words(job: Job, knowledge: Knowledge) -> str:
    """Return how large a batch is."""
    size, known = job.dataset.global_batch_size, knowledge.samples
    text = f"{plural(size, 'sample')} per step, at every number of nodes"
    if known is None or size <= known.value:
        return text
    return f"{text}; more than the whole dataset, which has {plural(int(known.value), 'sample')}{by(known)}"


def drawn_in_words(job: Job) -> str | None:
    """Return how samples are drawn; None where each comes once per epoch, in a shuffled order."""
    sampler = job.dataset.sampler
    if sampler is None:
        return None
    if sampler.kind == "bucket_by":
        return f"in batches of like length ({sampler.values}), shuffled; each sample once per epoch"
    words = {
        "weights": f"as often as {sampler.values} says",
        "balance_by": f"each class of {sampler.values} equally often",
    }
    epoch = "as many draws as there are samples" if sampler.draws is None else plural(sampler.draws, "draw")
    return f"with replacement, {words[sampler.kind]}; an epoch is {epoch}"
