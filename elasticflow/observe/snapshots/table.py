"""Snapshots as a table that fits the terminal; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import number, plural, size, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.observe.snapshots.rows import SnapshotRow

_GAP = "  "
_COLUMNS = (
    "SNAPSHOT", "STEP", "EPOCHS", "SAMPLES", "SIZE", "AGE", "GEN", "WORKERS", "TRIGGER", "METRIC", "KEPT", "STATE",
)  # fmt: skip
# Where there is no room, these go, in this order: the name tells the generation, JSON has them all.
_FIRST_TO_GO = ("GEN", "SAMPLES", "EPOCHS", "WORKERS", "TRIGGER", "METRIC", "SIZE", "STEP")


def table(rows: Sequence[SnapshotRow], now: float, width: int | None) -> list[tuple[str, ...]]:
    """Return the header's cells and each row's, padded; columns that do not fit *width* are left out.

    Args:
        rows: What is shown.
        now: Unix time.
        width: Columns of the terminal; None: all columns are shown.
    """
    columns = {name: [name] for name in _COLUMNS}
    for row in rows:
        for name, text in _cells(row, now).items():
            columns[name].append(text)
    widths = {name: max(map(len, texts)) for name, texts in columns.items()}
    says_nothing = ["STATE"] if all(row.state == "committed" for row in rows) else []
    for name in (*says_nothing, *_FIRST_TO_GO):
        if width is None or sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        del widths[name]
    padded = [[f"{text:<{widths[name]}}" for text in columns[name]] for name in widths]
    return list(zip(*padded, strict=True))


def line(cells: Sequence[str]) -> str:
    """Return the cells of a row as text."""
    return _GAP.join(cells).rstrip()


def notes(rows: Sequence[SnapshotRow]) -> list[str]:
    """Return what a table has no room for: why a snapshot is not committed, and the notes of pins."""
    found = [f"{row.name}  {row.state}: {row.reason}" for row in rows if row.reason]
    return found + [f"{row.name}  pinned: {row.note}" for row in rows if row.note]


def summary(rows: Sequence[SnapshotRow]) -> str:
    """Return `5 snapshots, 4.0 MB, 1 set aside`."""
    committed = [row for row in rows if row.state == "committed"]
    texts = [plural(len(committed), "snapshot")]
    if committed:
        texts.append(size(sum(row.manifest.size for row in committed if row.manifest)))
    counts = {
        state: sum(row.state == state for row in rows) for state in ("set aside", "damaged", "unfinished")
    }
    texts += [f"{count} {state}" for state, count in counts.items() if count]
    return ", ".join(texts)


def _cells(row: SnapshotRow, now: float) -> dict[str, str]:
    found = row.manifest
    return {
        "SNAPSHOT": row.name,
        "STEP": str(row.step),
        "EPOCHS": str(found.epoch) if found else "-",
        "SAMPLES": f"{found.samples:,}" if found else "-",
        "SIZE": size(found.size) if found else "-",
        "AGE": span(max(0.0, now - found.created)) if found else "-",
        "GEN": str(row.generation),
        "WORKERS": str(found.world_size) if found else "-",
        "TRIGGER": found.trigger if found else "-",
        "METRIC": number(found.metric) if found else "-",
        "KEPT": ", ".join(row.kept) or "-",
        "STATE": row.state,
    }
