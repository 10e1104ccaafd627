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
    from collections.abc import Iterator

    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

# `error` and `log` have these facts.
_NOT_SHOWN = {"reason", "stacks"}
_LABELS = {
    "overlap": "overlap", "began_anew": "restart", "data": "data", "slow_ranks": "slow", "lingered": "end", "warnings": "warning",
}  # fmt: skip


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
    facts = {**vars(stop), "at": at, "charged": stop.charged, "log": log_of(stop, folder)}
    return {name: facts[name] for name in facts if name not in _NOT_SHOWN}


def notes_of(history: RunHistory) -> dict[str, str | list[str] | None]:
    """Return the run's warnings by subject, as `status --format json` prints them."""
    overlap, anew = history.last.get(events.OVERLAP_FOUND), history.began_anew
    return {
        "overlap": None if overlap is None else _text_of(overlap),
        "began_anew": None if anew is None else _text_of(anew, with_generation=True),
        "data": [_text_of(record) for record in history.data_warnings.values()],
        "slow_ranks": [_text_of(record, with_generation=True) for record in history.slow_ranks.values()],
        "lingered": [_text_of(record) for record in history.lingered],
        "warnings": [warning.in_words for warning in history.warnings.values()],
    }


def note_rows(history: RunHistory, most: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the run's warnings, each after a word for its subject; at most *most* of a subject, then how many are left out."""
    for name, note in notes_of(history).items():
        texts = [note] if isinstance(note, str) else note or []
        yield from ((_LABELS[name], text) for text in texts[:most])
        if most is not None and len(texts) > most:
            yield _LABELS[name], f"and {len(texts) - most} more, which `why` shows"


def _text_of(record: Record, *, with_generation: bool = False) -> str:
    line = line_of(record)
    where = f" (generation {record.get('generation')})" if with_generation else ""
    return "" if line is None else f"{line.text}{where}"
