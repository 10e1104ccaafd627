"""`elasticflow snapshots list [RUN]`: a run's snapshots, the newest first."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json
from elasticflow.cli.snapshots.selection import find, find_rows, form_options, option_option, words_argument
from elasticflow.observe.snapshots.table import line, notes, summary, table

if TYPE_CHECKING:
    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow

COLOURS = {"committed": None, "set aside": "yellow", "damaged": "red", "unfinished": "bright_black"}


@click.command("list")
@words_argument("[RUN]")
@option_option
@form_options
def command(words: tuple[str, ...], options: tuple[str, ...], form: str) -> None:
    """List the snapshots of RUN, the newest first, with why each stays; those set aside or unfinished too.

    KEPT says which rules keep a snapshot: `best`, `every` and `pinned` hold for good; `newest`, `parent` (the newest
    went on from it), `last`, `within` and `borrowed` (one that stays needs its files) pass with time.

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
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    header, *lines = table(rows, time.time(), width)
    click.echo(paint(line(header), dim=True))
    for row, cells in zip(rows, lines, strict=True):
        click.echo(paint(line(cells), COLOURS[row.state]))
    for text in notes(rows):
        click.echo(paint(text, dim=True))
