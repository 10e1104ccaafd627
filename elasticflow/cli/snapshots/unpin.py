"""`elasticflow snapshots unpin [RUN] SNAPSHOT`: leave it to the policy again."""

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


@click.command("unpin")
@words_argument("[RUN] SNAPSHOT...")
@option_option
def command(words: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Leave SNAPSHOT of RUN to the job's policy again; the next retention may remove it.

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
