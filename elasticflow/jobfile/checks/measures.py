"""The keys that model FLOPs utilization (MFU) needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source


def check_measures(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of the keys of MFU."""
    model, logging = tables.get("model"), tables.get("logging")
    if model is None or logging is None:
        return
    if logging.peak_flops is not None and model.flops_per_sample is None:
        message = "logging.peak_flops is a part of MFU, which needs model.flops_per_sample"
        remedy = (
            "say how many floating-point operations training on one sample takes, forward and backward: "
            "of a transformer, some 6 x parameters x tokens"
        )
        yield source.problem(codes.MISSING, message, ("logging", "peak_flops"), remedy=remedy)
