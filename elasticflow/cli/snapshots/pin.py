"""`elasticflow snapshots pin` and `unpin`: exempt a snapshot from the policy, or return it to the policy."""

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
@click.option("--note", default="", metavar="TEXT", help="The reason; list and show print it.")
@option_option
def pin(words: tuple[str, ...], options: tuple[str, ...], note: str) -> None:
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


@click.command("unpin")
@words_argument("[RUN] SNAPSHOT...")
@option_option
def unpin(words: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Return SNAPSHOT of RUN to the job's policy; the next retention may remove it.

    \b
    elasticflow snapshots unpin mnist step:5000
    """
    source, names = find(words, options)
    rows = find_rows(source)
    for row in [find_named(source, rows, name) for name in required(names, "unpin")]:
        with store_errors("unpinned"):
            source.catalog.unpin(row.name)
        was = "unpinned" if row.note is not None else "was not pinned"
        click.echo(f"{row.name}  {was}")
