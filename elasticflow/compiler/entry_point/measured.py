"""What train.py measures of a step beside its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.source_code import Code, call

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import Job


def measures(job: Job) -> Code | None:
    """Return the `Measures(...)` argument, or None for the default."""
    options = {
        "count_name": job.logging.count_name,
        "flops_per_sample": job.model.flops_per_sample,
        "peak_flops": job.logging.peak_flops,
        "is_half": (job.model.flops_per_sample is not None and job.train.precision != "fp32") or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return call("Measures", **given) if given else None


def clip_gradient(job: Job) -> Code:
    """Return the call that clips the gradient, and has its norm logged."""
    clip = call("nn.utils.clip_grad_norm_", "model.parameters()", "CLIP_GRAD_NORM")
    return clip if job.logging.grad_norm is False else call("worker.log_grad_norm", clip)
