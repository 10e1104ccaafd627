"""A run's generations: what each was restored from, how it ended, which snapshots it left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.records import read
from elasticflow.observe.status import is_locked
from elasticflow.system.records import printable_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow

_VANISHED = "ended without a word: its supervisor was killed"


@dataclass(frozen=True)
class Generation:
    """One worker group and the snapshots it left.

    Attributes:
        number: Its number over the whole run.
        launch: The launch it belongs to; None if nothing tells.
        reason: Why it was formed: start, crash, resume ...; None if nothing tells.
        world_size: Workers; None if nothing tells.
        parent: Name of the snapshot it went on from; None: the beginning, or nothing tells.
        ended: How it ended; None while it runs, or if nothing tells.
        taken: Snapshots it committed; None if nothing tells.
        snapshots: Those of them that are still there, the oldest first.
    """

    number: int
    launch: int | None = None
    reason: str | None = None
    world_size: int | None = None
    parent: str | None = None
    ended: str | None = None
    taken: int | None = None
    snapshots: tuple[SnapshotRow, ...] = field(default=(), repr=False)

    def facts(self) -> dict[str, Any]:
        """Return what `--format json` prints."""
        return {**vars(self), "snapshots": [row.name for row in self.snapshots]}


def generations(source: SnapshotSource, rows: Sequence[SnapshotRow]) -> list[Generation]:
    """Return the run's generations, the oldest first: from its snapshots and, where they are, its events.

    Raises:
        OSError: the place cannot be read.
    """
    claims = {number: printable_in(claim) for number, claim in source.catalog.generations().items()}
    told = {} if source.folder is None else _told(read(source.folder.events))
    numbers = sorted(claims.keys() | told.keys() | {row.generation for row in rows})
    for number, about in told.items():
        runs = source.folder is not None and number == numbers[-1] and is_locked(source.folder)
        if "ended" not in about and not runs:
            about["ended"] = _VANISHED
    return [_generation(n, claims.get(n, {}), told.get(n, {}), rows) for n in numbers]


def _generation(
    number: int, claim: Mapping[str, Any], told: Mapping[str, Any], rows: Sequence[SnapshotRow]
) -> Generation:
    own = tuple(sorted((r for r in rows if r.generation == number), key=lambda r: (r.step, r.name)))
    first = next((row.manifest for row in own if row.manifest), None)
    return Generation(
        number=number,
        launch=_number(claim, "launch"),
        reason=_text(told, "reason") or _text(claim, "reason") or _text(claim, "way"),
        world_size=(first.world_size if first else None)
        or _number(told, "world_size")
        or _number(claim, "world_size"),
        parent=(first.parent if first else None) or _text(told, "parent"),
        ended=told.get("ended"),
        taken=len(told["taken"] | {r.name for r in own if r.state == "committed"}) if told else None,
        snapshots=own,
    )


def _number(record: Mapping[str, Any], key: str) -> int | None:
    found = record.get(key)
    return found if type(found) is int else None


def _text(record: Mapping[str, Any], key: str) -> str | None:
    found = record.get(key)
    return found if isinstance(found, str) else None


def _told(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what the run's events say about each generation."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        number = record.get("generation")
        if isinstance(number, int) and number > 0:
            _note(found.setdefault(number, {"taken": set()}), record)
    return found


def _note(about: dict[str, Any], record: Mapping[str, Any]) -> None:
    match record.get("event"):
        case events.GENERATION_STARTED:
            about |= {"reason": record.get("reason"), "world_size": record.get("world_size")}
        case events.TRAINING_STARTED:
            about["parent"] = record.get("restored_from")
        case events.SNAPSHOT_COMMITTED:
            about["taken"].add(str(record.get("name")))
        case events.WORKER_FAILED if record.get("rank") is not None:
            about["rank"] = record["rank"]
        case events.DRAIN_REQUESTED:
            about["why"] = record.get("reason")
        case events.GENERATION_ENDED:
            about["ended"] = _end(record, about)
        case events.RUN_INTERRUPTED | events.RUN_FAILED | events.RUN_FINISHED:
            about.setdefault("ended", f"{record['event'].removeprefix('run.')} at step {record.get('step')}")
        case _:
            return


def _end(record: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    step, kind = record.get("step"), record.get("class")
    if kind == "finished":
        return f"training finished at step {step}"
    if kind == "drained":
        return f"drained after step {step} ({about.get('why') or 'asked to leave'})"
    rank = f"rank {about['rank']} " if "rank" in about else ""
    reason = (str(record.get("reason") or "no reason is known").splitlines() or [""])[0]
    return f"{kind} after step {step}: {rank}{reason}"
