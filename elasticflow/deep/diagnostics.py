"""The findings of `--deep` as diagnostics at the keys of the job file, with the checks that need its facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from elasticflow.jobfile.checks.all import check_lengths
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.system.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.deep.check import DeepReport
    from elasticflow.deep.messages import Problem
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job, ValidTables
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
_LIMIT = ("snapshots", "staging_limit")


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


def check_deep_facts(
    source: Source, job: Job, *, samples: int | None, snapshot_bytes: int | None, memory_bytes: int | None
) -> Iterator[Diagnostic]:
    """Yield the problems of a job, given the size of its data and of its snapshots.

    Args:
        job: The job, which has no errors.
        memory_bytes: Main memory of this machine; each node is assumed to have as much.
    """
    tables = cast("ValidTables", {name: getattr(job, name) for name in type(job).model_fields})
    if samples is not None and job.dataset.samples is None:
        tables["dataset"] = job.dataset.model_copy(update={"samples": samples})
        yield from check_lengths(source, tables)
    if snapshot_bytes is not None:
        yield from _staging(source, job, snapshot_bytes, memory_bytes)


def _staging(source: Source, job: Job, snapshot_bytes: int, memory_bytes: int | None) -> Iterator[Diagnostic]:
    """Yield a warning if staged snapshots need more memory than a node has: with the fewest nodes, each stages the most."""
    nodes, snapshots = job.nodes.min, job.snapshots
    part = -(-snapshot_bytes // nodes)
    settings = snapshots.settings()
    held = settings.held_states * snapshot_bytes if settings.is_held_at_interval and nodes == 1 else 0
    needed = max(part, held)
    if snapshots.staging_limit is not None and needed > parse_size(snapshots.staging_limit):
        message = f"snapshots.staging_limit is too small: each node takes {gib(needed)} for snapshots"
        remedy = f"raise it to {gib(needed)} or more, or train on more nodes: each stages a smaller part"
        yield source.problem(codes.STAGING_MEMORY, message, _LIMIT, severity="warning", remedy=remedy)
    elif memory_bytes is not None and part + held > memory_bytes:
        what = "staging a snapshot and holding it in memory" if held else "staging a snapshot"
        message = f"{what} takes {gib(part + held)} on each node, and this machine has {gib(memory_bytes)}"
        remedy = "train on more nodes: each stages a smaller part"
        if held:
            remedy = f"leave snapshots.memory out (it holds {settings.held_states} copies), or train on nodes with more memory"
        path: KeyPath = ("snapshots", "memory") if held else ("snapshots",)
        yield source.problem(codes.STAGING_MEMORY, message, path, severity="warning", remedy=remedy)


def gib(size: int) -> str:
    """Return a size for people: `1.5 GiB`, or in MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(1, round(size / 2**20))} MiB"
