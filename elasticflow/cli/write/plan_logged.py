"""What `plan` says of what a job logs beside its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.sinks.registry import missing_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.tables.hooks import HookTable
    from elasticflow.jobfile.tables.job import Job, LoggingTable


def logged(job: Job) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line, for what the job asks for by keys."""
    parts = []
    if job.logging.count_name is not None:
        parts.append(f"{job.logging.count_name}/s, by the count of model.step or model.loss_count")
    if job.script is None and job.model.flops_per_sample is not None:
        peak = job.logging.peak_flops
        of = "the GPU's peak, if it is known by its name" if peak is None else f"{peak:.4g} FLOP/s a device"
        parts.append(f"MFU, of {of}")
    if job.logging.grad_norm:
        parts.append("the gradient's norm")
    if parts:
        yield "logged", "; ".join(parts)
    if job.logging.chosen_sinks():
        yield "sinks", "; ".join(_sinks(job.logging))
    if job.notify is not None:
        told = f"{', '.join(job.notify.ways())}, on {', '.join(job.notify.on)}"
        yield "notify", told.replace("notify.", "")
    if job.hooks is not None and (hooks := job.hooks.named()):
        yield "hooks", "; ".join(f"{name} {_called(hook)}" for name, hook in hooks.items())


def _sinks(logging: LoggingTable) -> Iterator[str]:
    for name, options in logging.chosen_sinks().items():
        given = ", ".join(f"{key} {value}" for key, value in options.items())
        missing = missing_of(name)
        remedy = f", not installed: pip install 'elasticflow[{missing}]'" if missing else ""
        yield f"{name}{f' ({given})' if given and name not in logging.custom else ''}{remedy}"


def _called(hook: HookTable) -> str:
    often = "" if hook.every is None else f" each {hook.every}"
    return f"{hook.entry}{often}{', on all ranks' if hook.all_ranks else ''}"
