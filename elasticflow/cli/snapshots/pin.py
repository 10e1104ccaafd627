"""`elasticflow snapshots pin [RUN] SNAPSHOT`: keep it, whatever the policy says."""

from __future__ import annotations

import click

from elasticflow.cli.snapshots.selection import (
    find,
    find_named,
    find_rows,
    option_option,
    required,
    store_errors,
    words_argument,
)
from elasticflow.errors import SnapshotNotFoundError


@click.command("pin")
@words_argument("[RUN] SNAPSHOT...")
@click.option("--note", default="", metavar="TEXT", help="Why; shown by list and show.")
@option_option
def command(words: tuple[str, ...], options: tuple[str, ...], note: str) -> None:
    """Keep SNAPSHOT of RUN until it is unpinned: neither retention nor `prune` removes it.

    \b
    elasticflow snapshots pin best --note "used in the paper"
    elasticflow snapshots pin mnist step:5000
    """
    source, names = find(words, options)
    rows = find_rows(source)
    for row in [find_named(source, rows, name) for name in required(names, "pin")]:
        if row.state != "committed":
            raise SnapshotNotFoundError(
                f"{row.name} is {row.state}: {row.reason}", "only a snapshot that could be restored is pinned"
            )
        with store_errors("pinned"):
            source.catalog.pin(row.name, note)
        click.echo(f"{row.name}  pinned{f': {note}' if note else ''}")
