"""What went wrong in a run, and what became of it: read from its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.records import read
from elasticflow.observe.status import is_locked, lost_of, read_status
from elasticflow.observe.terminal.event_lines import amount, evaluation_overlaps, said_on_stderr, whole
from elasticflow.observe.terminal.formats import moment, rfc3339

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder

SUPERVISOR_LOST = "supervisor_lost"
# Ends of a generation that nobody has to ask about.
_AS_WANTED = frozenset({"finished", "drained", "resized", "preempted"})


@dataclass
class Incident:
    """One generation that ended otherwise than it should, or a launch that could not go on.

    Attributes:
        generation: Its number; 0 before the first.
        at: Unix time of the end.
        kind: Class of the failure, as the budget counts it.
        error: The root cause in one line.
        step: Last finished step.
        rank: The worker that failed first; None if it was a node, or no worker.
        node: Where.
        pid: Its process.
        phase: What a rank that hung was doing.
        traceback: The worker's own.
        stderr: The last lines of its standard error, if it died without an exception of its own.
        others: The other ranks' failures in one line.
        log: What the worker printed, or the stacks of one that hung.
        charged: It counted against the restart budget.
        left: Restarts left then.
        back_s: Seconds from the failure to the next finished step.
        redone: Steps that were done again.
        verdict: Why the run ended with it, if it did.
        likely: What probably happened, where only so much is known.
    """

    generation: int
    at: float | None
    kind: str
    error: str
    step: int
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    phase: str | None = None
    traceback: str | None = None
    others: str | None = None
    log: str | None = None
    charged: bool = False
    left: int | None = None
    back_s: float | None = None
    redone: int | None = None
    verdict: str | None = None
    stderr: tuple[str, ...] = ()
    likely: str | None = None


def incidents(folder: RunFolder) -> list[Incident]:
    """Return what went wrong in the run, oldest first; none if nothing did."""
    found = _told(folder)
    if not is_locked(folder) and (ending := lost_of(folder)) is not None:
        status = read_status(folder)
        at = None if status.updated is None else rfc3339(status.updated)
        found.append(_lost({"generation": status.generation, "step": status.step, "timestamp": at, **ending}))
    return found


def overlap_of(folder: RunFolder) -> str | None:
    """Return what the run said of evaluation samples that are in its training data; None if it said nothing."""
    found = [event for event in read(folder.events) if event.get("event") == events.OVERLAP_FOUND]
    return evaluation_overlaps(found[-1]).text if found else None


def _told(folder: RunFolder) -> list[Incident]:
    """Return what the run's events tell of."""
    found: list[Incident] = []
    seen: dict[str, dict[str, Any]] = {}  # of the generation that is told of, by name
    last: Incident | None = None  # the one whose outcome is still being told
    for event in read(folder.events):
        match event.get("event"):
            case events.WORKER_FAILED | events.HANG_DETECTED | events.NODE_LOST as name:
                seen[name] = event
            case events.GENERATION_ENDED:
                last = None
                if event.get("class") not in _AS_WANTED:
                    failed = seen.get(events.WORKER_FAILED) or seen.get(events.NODE_LOST, {})
                    last = _incident(event, failed, seen.get(events.HANG_DETECTED, {}), folder)
                    found.append(last)
                seen = {}
            case events.SUPERVISOR_LOST:
                last = _lost(event)
                found.append(last)
            case events.RUN_FAILED:
                if last is None or last.back_s is not None or last.kind == SUPERVISOR_LOST:
                    last = _incident({**event, "reason": event.get("error")}, {}, {}, folder)
                    found.append(last)
                last.verdict = str(event.get("why") or "the run failed")
            case _:
                if last is not None:
                    _tell_outcome(last, event)
    return found


def _lost(event: dict[str, Any]) -> Incident:
    """Return a launch whose supervisor could not say how it ended."""
    return Incident(
        generation=whole(event, "generation"),
        at=moment(event.get("timestamp")),
        kind=SUPERVISOR_LOST,
        error=f"the supervisor ended without a word after step {whole(event, 'step')}: {event.get('known')}",
        step=whole(event, "step"),
        likely=event.get("likely"),
    )


def _incident(
    ended: dict[str, Any], failed: dict[str, Any], hung: dict[str, Any], folder: RunFolder
) -> Incident:
    """Return how a generation *ended*, whose first worker or node *failed* and whose rank *hung*, if any did."""
    rank = failed.get("rank") if failed else ended.get("rank")
    log = hung.get("stacks")
    generation = whole(ended, "generation")
    if log is None and rank is not None:
        stderr = folder.rank_log(generation, rank, "stderr")
        log = str(stderr) if stderr.exists() else None
    return Incident(
        generation=generation,
        at=moment(ended.get("timestamp")),
        kind=str(ended.get("class")),
        error=str(failed.get("error") or ended.get("reason")),
        step=whole(ended, "step"),
        rank=rank,
        node=failed.get("node"),
        pid=failed.get("pid"),
        phase=hung.get("phase"),
        traceback=failed.get("traceback"),
        stderr=said_on_stderr(failed),
        others=failed.get("others"),
        log=log,
    )


def _tell_outcome(incident: Incident, event: dict[str, Any]) -> None:
    match event.get("event"):
        case events.BUDGET_CHARGED:
            incident.charged, incident.left = True, whole(event, "left")
        case events.TRAINING_STARTED:
            incident.redone = max(0, incident.step - whole(event, "step"))
        case events.TRAINING_FIRST_STEP if incident.back_s is None:
            incident.back_s = amount(event, "seconds_since_failure")
