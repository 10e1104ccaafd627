"""The failures of a run with their consequences, and its warnings: about data and restarts, and of the job's own code."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.launcher.journal.post_mortem import ending_of
from elasticflow.observe.history import RunHistory, Stop
from elasticflow.observe.status import is_locked, read_status
from elasticflow.observe.terminal.event_lines import line_of
from elasticflow.observe.terminal.formats import rfc3339

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

_SHOWN = (
    *(
        "generation",
        "at",
        "kind",
        "error",
        "step",
        "rank",
        "node",
        "pid",
        "phase",
        "traceback",
        "others",
        "log",
    ),
    *("charged", "left", "back_s", "redone", "verdict", "stderr", "likely", "script_again_s", "dumps"),
)


def incidents(folder: RunFolder, history: RunHistory | None = None) -> list[Stop]:
    """Return the failures of the run, oldest first.

    Args:
        history: The run's history, if it was read already.
    """
    history = history or RunHistory.read(folder)
    stops = [stop for stop in history.stops if stop.is_failure]
    if not is_locked(folder) and (ending := ending_of(folder)) is not None:
        status = read_status(folder)
        facts = {"generation": status.generation, "step": status.step, **asdict(ending)}
        stops.append(Stop.of_supervisor(facts, status.updated))
    return stops


def log_of(stop: Stop, folder: RunFolder) -> str | None:
    """Return the file with the stacks of a worker that hung, or with the output of a worker that failed, if it said anything."""
    if stop.stacks is not None or stop.rank is None:
        return stop.stacks
    stderr = folder.rank_log(stop.generation, stop.rank, "stderr")
    return str(stderr) if stderr.exists() and stderr.stat().st_size else None


def to_json(stop: Stop, folder: RunFolder) -> dict[str, Any]:
    """Return the stop as `--format json` prints it; times are RFC 3339 in UTC."""
    at = None if stop.at is None else rfc3339(stop.at)
    given = {"at": at, "log": log_of(stop, folder)}
    return {name: given[name] if name in given else getattr(stop, name) for name in _SHOWN}


def overlap_of(history: RunHistory) -> str | None:
    """Return the run's warning of evaluation samples that are in its training data; None if there is no such warning."""
    record = history.last.get(events.OVERLAP_FOUND)
    return None if record is None else _text_of(record)


def data_warnings_of(history: RunHistory) -> list[str]:
    """Return the run's warnings of samples that vary or were not checked."""
    return [_text_of(record) for record in history.data_warnings.values()]


def slow_ranks_of(history: RunHistory) -> list[str]:
    """Return the run's warnings of ranks that were slower than the others, the newest of each rank."""
    return [f"{_text_of(r)} (generation {r.get('generation')})" for r in history.slow_ranks.values()]


def lingered_of(history: RunHistory) -> list[str]:
    """Return the workers that were ended because they stayed after their peers, and what held them."""
    return [_text_of(record) for record in history.lingered]


def code_warnings_of(history: RunHistory) -> list[str]:
    """Return the warnings of the job's code and its libraries, in the order of their first time."""
    return [warning.in_words for warning in history.warnings.values()]


def restart_anew_of(history: RunHistory) -> str | None:
    """Return a warning that the job's script was started again with no step known; None if it was not."""
    record = history.began_anew
    return None if record is None else f"{_text_of(record)} (generation {record.get('generation')})"


def _text_of(record: Record) -> str:
    line = line_of(record)
    return "" if line is None else line.text
