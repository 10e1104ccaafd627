"""What a plan says of facts that the job file does not tell, and of snapshots (floor 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.observe.formats import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.cli.plan_text import PlanView
    from elasticflow.compiler.forecast import Known


def by(known: Known) -> str:
    """Return ` (run 20261120-104500-4f2a)`: who told; the job file itself goes without saying."""
    return "" if known.source == "dataset.samples" else f" ({known.source})"


def any_of(every: Sequence[str]) -> str:
    """Return `every 10 min or 1 epoch`."""
    return "every " + " or ".join(every)


def unknown(view: PlanView, fact: str) -> str:
    """Return when a fact will be known, and why the last run does not tell it."""
    why = "known after the first run, or with --deep"
    if view.lesson is not None and fact in view.lesson.outdated:
        return f"{why} (run {view.lesson.run_id} had another {view.lesson.outdated[fact]})"
    return why


def snapshots(view: PlanView) -> str:
    """Return when and where snapshots are taken."""
    plan = view.plan.snapshots
    place = plan.uri or f"runs/{view.plan.job_name}/<run id>"
    held = f"; held in memory every {plan.memory}" if plan.memory else ""
    return f"{any_of(plan.every)}, at the end and when asked to leave; in {place}{held}"


def written(view: PlanView) -> str:
    """Return how large they are, and how many bytes that makes."""
    ahead, known = view.ahead, view.known.snapshot_bytes
    parts = [
        f"how large: {unknown(view, 'snapshot_bytes')}"
        if known is None
        else f"{size(known.value)} each{by(known)}"
    ]
    if ahead.snapshots_per_hour is None:
        parts.append("how many an hour: known after the first run")
    else:
        word = "at least" if ahead.is_least else "about"
        rate = f"{word} {ahead.snapshots_per_hour:,.0f} an hour"
        parts.append(
            rate if ahead.bytes_per_hour is None else f"{rate}, {size(ahead.bytes_per_hour)} an hour"
        )
    if ahead.snapshots is not None and not ahead.is_least:
        total = "" if known is None else f", {size(ahead.snapshots * known.value)}"
        parts.append(f"{ahead.snapshots:,} in the whole run{total}")
    return "; ".join(parts)


def kept(view: PlanView) -> str:
    """Return which stay, and how many bytes that are at most."""
    keep, ahead = view.job.snapshots.keep, view.ahead
    stay = [f"the last {keep.last}"]
    stay += [f"the best {keep.best}"] if keep.best is not None else []
    stay += [f"one every {keep.every}"] if keep.every is not None else []
    stay += [f"those of the last {keep.within}"] if keep.within is not None else []
    told = stay[0] if len(stay) == 1 else f"{', '.join(stay[:-1])} and {stay[-1]}"
    if ahead.kept is None:
        return f"{told} stay; how many that are: known after the first run"
    held = "" if ahead.kept_bytes is None else f", {size(ahead.kept_bytes)}"
    return f"{told} stay: at most {ahead.kept:,}{held}, and one more while it is written"
