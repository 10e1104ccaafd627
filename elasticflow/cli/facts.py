"""A run's status as JSON facts and as words."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elasticflow.observe.terminal.formats import number, rfc3339

if TYPE_CHECKING:
    from elasticflow.observe.status import RunStatus, Status

COLOURS: dict[Status, str] = {
    "running": "cyan",
    "finished": "green",
    "interrupted": "yellow",
    "failed": "red",
}


def facts_of(status: RunStatus) -> dict[str, Any]:
    """Return what `--format json` prints; times are RFC 3339 in UTC."""
    facts = {"job": status.folder.job, "run_id": status.folder.run_id, **asdict(status)}
    facts["folder"] = str(status.folder.path)
    for name in ("started", "launched", "updated"):
        facts[name] = None if facts[name] is None else rfc3339(facts[name])
    return facts


def progress_of(status: RunStatus) -> str:
    """Return `93 of 230 (40 %)`, or the step alone while the end is unknown."""
    if status.steps is None:
        return str(status.step)
    return f"{status.step} of {status.steps} ({100 * status.step // status.steps} %)"


def evaluation_of(status: RunStatus) -> str:
    """Return `accuracy 0.9806`: the metrics that are not the loss, else the loss; empty if there are none."""
    named = {k: v for k, v in status.evaluation.items() if k != "loss"} or status.evaluation
    return ", ".join(f"{name} {number(value)}" for name, value in named.items())
