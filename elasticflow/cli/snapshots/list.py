"""`elasticflow snapshots list [RUN]`: a run's snapshots, the newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json, table, terminal_width
from elasticflow.cli.snapshots.selection import find, find_rows, form_options, option_option, words_argument
from elasticflow.observe.terminal.formats import number, plural, size, span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow

_HEADER = (
    "SNAPSHOT", "STEP", "EPOCHS", "SAMPLES", "SIZE", "AGE", "GEN", "WORKERS", "TRIGGER", "METRIC", "KEPT", "STATE",
)  # fmt: skip
# A narrow terminal leaves out these columns in this order: the name says the generation, JSON has them all.
_FIRST_TO_GO = ("GEN", "SAMPLES", "EPOCHS", "WORKERS", "TRIGGER", "METRIC", "SIZE", "STEP")
_COLOURS = {
    "committed": None, "set aside": "yellow", "damaged": "red", "other version": "yellow", "unfinished": "bright_black",
}  # fmt: skip


@click.command("list")
@words_argument("[RUN]")
@option_option
@form_options
def command(words: tuple[str, ...], options: tuple[str, ...], form: str) -> None:
    """List the snapshots of RUN, the newest first, including those that were set aside or are unfinished.

    KEPT names the rules that keep a snapshot: `best`, `every` and `pinned` hold for good; `newest`, `parent` (the newest
    resumed from it), `last`, `within` and `borrowed` (a snapshot that stays needs its files) pass with time.

    \b
    elasticflow snapshots list
    elasticflow snapshots list mnist --json
    elasticflow snapshots list s3://bucket/mnist/20261120-104500-4f2a --option anon=true
    """
    source, names = find(words, options)
    if names:
        raise click.UsageError(f"list takes a run only; try: elasticflow snapshots show {names[0]}")
    rows = find_rows(source)
    if form == "json":
        print_json([row.facts() for row in rows])
    elif not rows:
        click.echo(f"no snapshots of {source.label} at {source.uri}", err=True)
    else:
        _print(source, rows)


def _print(source: SnapshotSource, rows: list[SnapshotRow]) -> None:
    click.echo(f"{paint(source.label, bold=True)}  {summary(rows)}")
    click.echo("\n".join(table_of(rows, time.time(), terminal_width())))
    for note in notes(rows):
        click.echo(paint(note, dim=True))


def table_of(rows: Sequence[SnapshotRow], now: float, width: int | None) -> Iterator[str]:
    """Yield the lines of the table of snapshots.

    Args:
        now: Unix time.
        width: Width of the terminal in columns; None: the whole table is shown.
    """
    says_nothing = ["STATE"] if all(row.state == "committed" for row in rows) else []
    cells = [[paint(text, _COLOURS[row.state]) for text in _cells(row, now)] for row in rows]
    return table(_HEADER, cells, width=width, first_to_go=(*says_nothing, *_FIRST_TO_GO))


def notes(rows: Sequence[SnapshotRow]) -> list[str]:
    """Return the notes below the table: why a snapshot is not committed, and the notes of pins."""
    reasons = [f"{row.name}  {row.state}: {row.reason}" for row in rows if row.reason]
    return reasons + [f"{row.name}  pinned: {row.note}" for row in rows if row.note]


def summary(rows: Sequence[SnapshotRow]) -> str:
    """Return `5 snapshots, 4.0 MB, 1 set aside`."""
    committed = [row for row in rows if row.state == "committed"]
    texts = [plural(len(committed), "snapshot")]
    if committed:
        texts.append(size(sum(row.manifest.size for row in committed if row.manifest)))
    counts = {state: sum(row.state == state for row in rows) for state in _COLOURS if state != "committed"}
    texts += [f"{count} {state}" for state, count in counts.items() if count]
    return ", ".join(texts)


def _cells(row: SnapshotRow, now: float) -> tuple[str, ...]:
    manifest = row.manifest
    return (
        row.name,
        str(row.step),
        str(manifest.epoch) if manifest else "-",
        f"{manifest.samples:,}" if manifest else "-",
        size(manifest.size) if manifest else "-",
        span(max(0.0, now - manifest.created)) if manifest else "-",
        str(row.generation),
        str(manifest.world_size) if manifest else "-",
        manifest.trigger if manifest else "-",
        number(manifest.metric) if manifest else "-",
        ", ".join(row.kept) or "-",
        row.state,
    )
