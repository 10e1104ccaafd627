"""Batches and how their samples are drawn, in words, for `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import path_of_set
from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from elasticflow.compiler.plan.forecast import Knowledge, Known, KnownSets
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.types import Collate


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


def drawn_in_words(job: Job, sets: KnownSets | None) -> str | None:
    """Return how samples are drawn; None where each comes once per epoch, in a shuffled order."""
    sampler = job.dataset.sampler
    if job.dataset.mix:
        return _mixture_in_words(job, sets)
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


def _mixture_in_words(job: Job, known: KnownSets | None) -> str:
    """Return each set's share, and how often its samples come in an epoch, as far as that is known."""
    names = [each.entry for each in job.dataset.mix]
    weights = [each.weight for each in job.dataset.mix if each.weight is not None]
    epoch = "an epoch is as many samples as all sets have"
    if known is not None:
        places = sum(known.samples)
        parts = [
            f"{share:.1%} {name} ({size:,} samples, each {places * share / size:.3g} times an epoch)"
            for name, size, share in zip(names, known.samples, known.shares, strict=True)
        ]
        return f"{', '.join(parts)} ({known.source}); {epoch}"
    if weights:
        parts = [f"{weight / sum(weights):.1%} {name}" for name, weight in zip(names, weights, strict=True)]
        return f"{', '.join(parts)}; {epoch}; how often the samples of each come in it: known with --deep"
    sampler = job.dataset.sampler
    how = "by their sizes" if sampler is None else f"by their sizes at temperature {sampler.temperature:g}"
    return f"{', '.join(names)}, {how}: shares are known with --deep; {epoch}"


def batches_in_words(job: Job) -> str | None:
    """Return what makes batches; None where torch's own way does."""
    makers = [("dataset", job.dataset.collate)]
    makers += [(dotted(path_of_set(name)), each.collate) for name, each in job.evaluations.items()]
    parts = [
        _collate_in_words(each) + ("" if key == "dataset" else f" of {key}'s")
        for key, each in makers
        if each is not None
    ]
    return "; ".join(parts) or None


def _collate_in_words(collate: Collate) -> str:
    if isinstance(collate, str):
        return f"made by {collate}"
    if collate.partial:
        return f"made by {collate.entry} with {', '.join(collate.args) or 'no arguments'}"
    return f"made by an object of {collate.entry}" + (f" ({', '.join(collate.args)})" if collate.args else "")
