"""The lineage of a run's snapshots, drawn as a tree; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import plural
from elasticflow.run_folder import SNAPSHOT_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.observe.snapshots.generations import Generation
    from elasticflow.observe.snapshots.rows import SnapshotRow

_LINES = ("├── ", "├─▶ ", "└── ", "└─▶ ")  # between others and last; with an arrow at the one that is shown
_PLAIN_LINES = ("|-- ", "|-> ", "`-- ", "`-> ")
_MOST_GENERATIONS, _MOST_SNAPSHOTS = 20, 8


def draw(
    found: Sequence[Generation], rows: Sequence[SnapshotRow], shown: str, *, plain: bool = False
) -> list[tuple[str, bool]]:
    """Return the lines, each with whether it is that of *shown*: generations, their snapshots, how each ended.

    Of many generations those around the one of *shown* are drawn; of many snapshots the newest, and *shown*.

    Args:
        found: The generations, the oldest first.
        rows: All snapshots that are there.
        shown: Name of the snapshot an arrow points at.
        plain: Draw with ASCII.
    """
    position = next((i for i, each in enumerate(found) if any(r.name == shown for r in each.snapshots)), 0)
    first = max(0, min(position - _MOST_GENERATIONS // 2, len(found) - _MOST_GENERATIONS))
    last = min(len(found), first + _MOST_GENERATIONS)
    names = {row.name for row in rows}
    text = [(f"... {plural(first, 'earlier generation')}", False)] if first else []
    for number in range(first, last):
        text.append((_head(found[number], found[number - 1] if number else None, names), False))
        text += _branches(_leaves(found[number], shown), _PLAIN_LINES if plain else _LINES)
    return text + (
        [(f"... {plural(len(found) - last, 'later generation')}", False)] if last < len(found) else []
    )


def _branches(leaves: list[tuple[str, bool]], lines: tuple[str, ...]) -> list[tuple[str, bool]]:
    drawn = []
    for number, (leaf, is_shown) in enumerate(leaves):
        drawn.append((lines[2 * (number == len(leaves) - 1) + is_shown] + leaf, is_shown))
    return drawn


def _head(each: Generation, before: Generation | None, names: set[str]) -> str:
    facts = [_workers(each, before), each.reason or "", _start(each, names)]
    if each.launch is not None and (before is None or before.launch != each.launch):
        facts.append(f"launch {each.launch}")
    return f"generation {each.number}  {', '.join(fact for fact in facts if fact)}".rstrip()


def _workers(each: Generation, before: Generation | None) -> str:
    if each.world_size is None:
        return ""
    text = plural(each.world_size, "worker")
    if before is None or before.world_size in {None, each.world_size}:
        return text
    return f"{text} (before: {before.world_size})"


def _start(each: Generation, names: set[str]) -> str:
    if each.parent is None:
        return "from the beginning" if each.number == 1 else ""
    match = SNAPSHOT_NAME.fullmatch(each.parent)
    gone = "" if each.parent in names else ", since removed"
    return f"from step {int(match['step']) if match else '?'} ({each.parent}{gone})"


def _leaves(each: Generation, shown: str) -> list[tuple[str, bool]]:
    rows = [row for row in each.snapshots if row.name == shown or row in each.snapshots[-_MOST_SNAPSHOTS:]]
    here = sum(row.state == "committed" for row in each.snapshots)
    notes = []
    if gone := (each.taken or here) - here:
        notes.append(f"{plural(gone, 'snapshot')} more, since removed")
    if left_out := len(each.snapshots) - len(rows):
        notes.append(f"{plural(left_out, 'snapshot')} more")
    leaves = [(_leaf(row), row.name == shown) for row in rows]
    return [*((note, False) for note in notes), *leaves, *([(each.ended, False)] if each.ended else [])]


def _leaf(row: SnapshotRow) -> str:
    facts = [row.manifest.trigger if row.manifest else "", "" if row.state == "committed" else row.state]
    if row.kept:
        facts.append(f"kept: {', '.join(row.kept)}")
    return f"step {row.step}  {row.name}  {', '.join(fact for fact in facts if fact)}".rstrip()
