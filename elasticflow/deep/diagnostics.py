"""Turns the findings of `--deep` into diagnostics at the keys of the job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import in_order

if TYPE_CHECKING:
    from elasticflow.deep.check import DeepReport
    from elasticflow.deep.messages import Problem
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.text.source import Source

_CODES = {
    "import": codes.DEEP_IMPORT,
    "factory": codes.DEEP_FACTORY,
    "result": codes.DEEP_RESULT,
    "sample": codes.DEEP_SAMPLE,
    "collate": codes.DEEP_COLLATE,
    "length": codes.DEEP_LENGTH,
    "state": codes.DEEP_STATE,
    "step": codes.DEEP_STEP,
    "weights": codes.DEEP_WEIGHTS,
    "loss": codes.DEEP_LOSS,
    "hang": codes.DEEP_HANG,
    "died": codes.DEEP_DIED,
    "device": codes.DEEP_UNKNOWN,
    "memory": codes.DEEP_UNKNOWN,
    "unknown": codes.DEEP_UNKNOWN,
    "left": codes.DEEP_LEFT,
    "overlap": codes.DEEP_OVERLAP,
    "other_data": codes.DEEP_OTHER_DATA,
    "restart": codes.DEEP_RESTART,
}
_REMEDIES = {
    "device": "the job needs a GPU, and there is none here: check it on a machine that has one",
    "memory": "the job needs more memory than this machine has: check it on a larger one",
}


def diagnostics_of(report: DeepReport, source: Source) -> list[Diagnostic]:
    """Return the problems in the order of their places in the job's files."""
    return in_order(_diagnostic(problem, source) for problem in report.problems)


def _diagnostic(problem: Problem, source: Source) -> Diagnostic:
    remedy = problem.remedy or _REMEDIES.get(problem.kind, "")
    lines = [f"at {frame}" for frame in problem.frames] + [remedy] * bool(remedy)
    return source.problem(
        _CODES[problem.kind],
        problem.message,
        tuple(int(part) if part.isdigit() else part for part in problem.key.split(".")),
        severity="warning" if problem.is_warning else "error",
        remedy="\n".join(lines) or None,
    )
