"""What went wrong in a run, and what became of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from elasticflow.observe.history import Failure, History, lost_supervisor
from elasticflow.observe.status import is_locked, lost_of, read_status
from elasticflow.observe.terminal.event_lines import (
    line_of,
    said_on_stderr,
)

if TYPE_CHECKING:
    from elasticflow.observe.history import Stop
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record


@dataclass
class Incident:
    """A generation that ended otherwise than it should, or a launch that could not go on.

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
        charged: Whether it counted against the restart budget.
        left: Restarts left after that.
        back_s: Seconds from the failure to the next finished step.
        script_again_s: Seconds from the failure until the job's own script ran again.
        redone: Steps that were done again.
        verdict: Why the run ended here, if it did.
        likely: What probably happened, where nothing is certain.
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
    script_again_s: float | None = None

    @property
    def again(self) -> tuple[str, float] | None:
        """What came after it, `training` or the start of the `script`, and the seconds until then; None: nothing did."""
        if self.back_s is not None:
            return "training", self.back_s
        return None if self.script_again_s is None else ("script started", self.script_again_s)


def incidents(folder: RunFolder, history: History | None = None) -> list[Incident]:
    """Return what went wrong in the run, oldest first; none if nothing did.

    Args:
        folder: The run.
        history: Its history, if that was read already.
    """
    history = history or History.read(folder)
    stops = [stop for stop in history.stops if stop.is_failure]
    if not is_locked(folder) and (ending := lost_of(folder)) is not None:
        status = read_status(folder)
        facts = {"generation": status.generation, "step": status.step, **asdict(ending)}
        stops.append(lost_supervisor(facts, status.updated))
    return [incident_of(stop, folder) for stop in stops]


def overlap_of(history: History) -> str | None:
    """Return what the run said of evaluation samples that are in its training data; None if it said nothing."""
    return None if history.overlap is None else _text_of(history.overlap)


def data_warnings_of(history: History) -> list[str]:
    """Return what the run said of samples that vary, or that were not looked into."""
    return [_text_of(record) for record in history.data_warnings.values()]


def restart_anew_of(history: History) -> str | None:
    """Return that the job's own script was started again without a step known, and when; None if it was not."""
    record = history.began_anew
    if record is None:
        return None
    return f"{_text_of(record)} (generation {record.get('generation')})"


def _text_of(record: Record) -> str:
    line = line_of(record)
    return "" if line is None else line.text


def headline(incident: Incident) -> str:
    """Return `rank 1: killed by SIGKILL`: whom it befell, and the root cause in one line."""
    if incident.rank is not None:
        return f"rank {incident.rank}: {incident.error}"
    return incident.error if incident.node is None else f"node {incident.node}: {incident.error}"


def incident_of(stop: Stop, folder: RunFolder) -> Incident:
    """Return what is known of an end of a generation, or of a launch."""
    failure, hang = stop.failure or Failure.of({}), stop.hang or {}
    rank = stop.rank if stop.failure is None else failure.rank
    log = hang.get("stacks")
    if log is None and rank is not None:
        stderr = folder.rank_log(stop.generation, rank, "stderr")
        log = str(stderr) if stderr.exists() else None
    return Incident(
        generation=stop.generation,
        at=stop.at,
        kind=stop.kind,
        error=failure.error or stop.reason,
        step=stop.step,
        rank=rank,
        node=failure.node,
        pid=failure.pid,
        phase=hang.get("phase"),
        traceback=failure.traceback,
        others=failure.others,
        log=log,
        charged=stop.left is not None,
        left=stop.left,
        back_s=stop.back_s,
        script_again_s=stop.script_again_s,
        redone=stop.redone,
        verdict=stop.verdict,
        stderr=said_on_stderr(failure.event),
        likely=stop.likely,
    )
