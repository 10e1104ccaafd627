"""A run's generations, each with the snapshot it began from and the snapshots it left, and their tree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticflow.observe.history import Generation, RunHistory
from elasticflow.observe.status import is_locked
from elasticflow.observe.terminal.formats import plural
from elasticflow.run_folder import step_of
from elasticflow.system.records import int_of, printable_in, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow

_VANISHED = "ended without a word: its supervisor was killed"
# Branches between others and of the last, each followed by its form with an arrow, for the snapshot that is shown.
_LINES = ("├── ", "├─▶ ", "└── ", "└─▶ ")
_PLAIN_LINES = ("|-- ", "|-> ", "`-- ", "`-> ")
_MOST_GENERATIONS, _MOST_SNAPSHOTS = 20, 8


@dataclass(frozen=True)
class LineageGeneration:
    """A generation and the snapshots it left.

    Attributes:
        number: Number over the whole run.
        reason: Reason it was formed: start, crash, resume ...; None if unknown.
        parent: Name of the snapshot it resumed from, or that a state in memory followed; None: the beginning, or unknown.
        memory_step: Step of the state in memory that it resumed from; None: from no such state.
        ended: End of the generation in words; None while it runs, or if unknown.
        taken: Number of snapshots it committed; None if unknown.
        snapshots: The generation's snapshots that still exist, the oldest first.
    """

    number: int
    launch: int | None = None
    reason: str | None = None
    world_size: int | None = None
    parent: str | None = None
    memory_step: int | None = None
    ended: str | None = None
    taken: int | None = None
    snapshots: tuple[SnapshotRow, ...] = field(default=(), repr=False)

    def facts(self) -> dict[str, object]:
        """Return the generation as `--format json` prints it."""
        return {**vars(self), "snapshots": [row.name for row in self.snapshots]}


def generations(source: SnapshotSource, rows: Sequence[SnapshotRow]) -> list[LineageGeneration]:
    """Return the run's generations, the oldest first, from its snapshots and, if present, its events.

    Raises:
        OSError: the place cannot be read.
    """
    claims = {number: printable_in(claim) for number, claim in source.catalog.generations().items()}
    history = RunHistory() if source.folder is None else RunHistory.read(source.folder)
    numbers = sorted(claims.keys() | history.generations.keys() | {row.generation for row in rows})
    is_running = source.folder is not None and is_locked(source.folder)
    lineage = []
    for number in numbers:
        recorded = history.generations.get(number)
        ended = None if recorded is None else _ended(recorded)
        if recorded is not None and ended is None and not (is_running and number == numbers[-1]):
            ended = _VANISHED
        taken = {e.name for e in history.snapshots if e.generation == number and e.state == "committed"}
        own = tuple(sorted((r for r in rows if r.generation == number), key=lambda r: (r.step, r.name)))
        taken |= {row.name for row in own if row.state == "committed"}
        generation = _generation(claims.get(number, {}), recorded or Generation(number), own)
        lineage.append(replace(generation, ended=ended, taken=None if recorded is None else len(taken)))
    return lineage


def _generation(
    claim: Mapping[str, Any], recorded: Generation, own: tuple[SnapshotRow, ...]
) -> LineageGeneration:
    first = next((row.manifest for row in own if row.manifest), None)
    return LineageGeneration(
        number=recorded.number,
        launch=_number(claim, "launch"),
        reason=recorded.reason or text_of(claim, "reason") or text_of(claim, "way"),
        world_size=(first.world_size if first else None)
        or recorded.world_size
        or _number(claim, "world_size"),
        parent=(first.parent if first else None) or recorded.parent,
        memory_step=recorded.memory_step,
        snapshots=own,
    )


def _number(record: Mapping[str, Any], key: str) -> int | None:
    return int_of(record, key) if type(record.get(key)) is int else None


def _ended(generation: Generation) -> str | None:
    """Return the end of a generation in words; None if unknown."""
    stop = generation.stop
    if stop is None:
        end = generation.run_end
        return None if end is None else f"{str(end['event']).removeprefix('run.')} at step {end.get('step')}"
    if stop.kind == "finished":
        return f"training finished at step {stop.step}"
    if stop.kind == "drained":
        return f"drained after step {stop.step} ({generation.drain_reason or 'asked to leave'})"
    rank = "" if generation.failed_rank is None else f"rank {generation.failed_rank} "
    reason = (stop.reason.splitlines() or [""])[0]
    return f"{stop.kind} after step {stop.step}: {rank}{reason}"


def draw(
    lineage: Sequence[LineageGeneration], rows: Sequence[SnapshotRow], shown: str, *, plain: bool = False
) -> list[tuple[str, bool]]:
    """Return the lines of the tree (generations, snapshots, ends), each with True for the line of *shown*.

    If there are many generations, only those around *shown* are drawn; of many snapshots, the newest and *shown*.

    Args:
        lineage: Generations of the run, the oldest first.
        shown: Name of the snapshot that gets an arrow.
        plain: Draw with ASCII.
    """
    position = next(
        (i for i, generation in enumerate(lineage) if any(r.name == shown for r in generation.snapshots)), 0
    )
    first = max(0, min(position - _MOST_GENERATIONS // 2, len(lineage) - _MOST_GENERATIONS))
    last = min(len(lineage), first + _MOST_GENERATIONS)
    names = {row.name for row in rows}
    text = [(f"... {plural(first, 'earlier generation')}", False)] if first else []
    for number in range(first, last):
        text.append((_title(lineage[number], lineage[number - 1] if number else None, names), False))
        text += _branches(_leaves(lineage[number], shown), _PLAIN_LINES if plain else _LINES)
    return text + (
        [(f"... {plural(len(lineage) - last, 'later generation')}", False)] if last < len(lineage) else []
    )


def _branches(leaves: list[tuple[str, bool]], lines: tuple[str, ...]) -> list[tuple[str, bool]]:
    drawn = []
    for number, (leaf, is_shown) in enumerate(leaves):
        drawn.append((lines[2 * (number == len(leaves) - 1) + is_shown] + leaf, is_shown))
    return drawn


def _title(generation: LineageGeneration, before: LineageGeneration | None, names: set[str]) -> str:
    facts = [_workers(generation, before), generation.reason or "", _start(generation, names)]
    if generation.launch is not None and (before is None or before.launch != generation.launch):
        facts.append(f"launch {generation.launch}")
    return f"generation {generation.number}  {', '.join(fact for fact in facts if fact)}".rstrip()


def _workers(generation: LineageGeneration, before: LineageGeneration | None) -> str:
    if generation.world_size is None:
        return ""
    text = plural(generation.world_size, "worker")
    if before is None or before.world_size in {None, generation.world_size}:
        return text
    return f"{text} (before: {before.world_size})"


def _start(generation: LineageGeneration, names: set[str]) -> str:
    if generation.memory_step is not None:
        return f"from step {generation.memory_step} in memory"
    if generation.parent is None:
        return "from the beginning" if generation.number == 1 else ""
    gone = "" if generation.parent in names else ", since removed"
    return f"from step {step_of(generation.parent)} ({generation.parent}{gone})"


def _leaves(generation: LineageGeneration, shown: str) -> list[tuple[str, bool]]:
    rows = [
        row
        for row in generation.snapshots
        if row.name == shown or row in generation.snapshots[-_MOST_SNAPSHOTS:]
    ]
    still_there = sum(row.state == "committed" for row in generation.snapshots)
    notes = []
    if gone := (generation.taken or still_there) - still_there:
        notes.append(f"{plural(gone, 'snapshot')} more, since removed")
    if left_out := len(generation.snapshots) - len(rows):
        notes.append(f"{plural(left_out, 'snapshot')} more")
    leaves = [(_leaf(row), row.name == shown) for row in rows]
    return [
        *((note, False) for note in notes),
        *leaves,
        *([(generation.ended, False)] if generation.ended else []),
    ]


def _leaf(row: SnapshotRow) -> str:
    facts = [row.manifest.trigger if row.manifest else "", "" if row.state == "committed" else row.state]
    if row.kept:
        facts.append(f"kept: {', '.join(row.kept)}")
    return f"step {row.step}  {row.name}  {', '.join(fact for fact in facts if fact)}".rstrip()
