"""`elasticflow snapshots show [RUN] [SNAPSHOT]`: the content and origin of one snapshot."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json
from elasticflow.cli.snapshots.selection import (
    find,
    find_one,
    find_rows,
    form_options,
    option_option,
    store_errors,
    words_argument,
)
from elasticflow.observe.snapshots.lineage import draw, generations
from elasticflow.observe.snapshots.page import page, tensors_by_prefix
from elasticflow.observe.terminal.colours import speaks_utf8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.observe.snapshots.lineage import LineageGeneration
    from elasticflow.observe.snapshots.rows import SnapshotRow


@click.command("show")
@words_argument("[RUN] [SNAPSHOT]")
@option_option
@form_options
def command(words: tuple[str, ...], options: tuple[str, ...], form: str) -> None:
    """Show the content of SNAPSHOT of RUN, why it is kept, and the run's generations with their snapshots as a tree.

    SNAPSHOT is a name, `latest`, `best` or `step:N`; default: `latest`.

    \b
    elasticflow snapshots show
    elasticflow snapshots show mnist step:500
    elasticflow snapshots show s3://bucket/mnist/20261120-104500-4f2a best --json
    """
    source, names = find(words, options)
    rows = find_rows(source)
    row = find_one(source, rows, names)
    with store_errors():
        lineage = generations(source, rows)
    if form == "json":
        print_json(_facts(row, lineage))
        return
    click.echo(f"{paint(f'{source.label}  {row.name}', bold=True)}")
    for text in page(row, source.rules, time.time()):
        click.echo(_dimmed(text))
    click.echo("\nlineage")
    for text, is_shown in draw(lineage, rows, row.name, plain=not speaks_utf8(sys.stdout)):
        click.echo(f"  {paint(text, bold=True) if is_shown else text}")


def _dimmed(text: str) -> str:
    if not text or text.startswith(" "):
        return text
    name, space, rest = text.partition(" ")
    return paint(name, dim=True) + space + rest


def _facts(row: SnapshotRow, lineage: Sequence[LineageGeneration]) -> dict[str, object]:
    manifest = row.manifest
    facts = {**row.facts(), "lineage": [generation.facts() for generation in lineage]}
    if manifest is None:
        return facts
    files = {name: asdict(entry) for name, entry in (manifest.files | manifest.borrowed).items()}
    about = {
        "files": {name: {**entry, "crc32": list(entry["crc32"])} for name, entry in files.items()},
        "tensors": [sum_of._asdict() for sum_of in tensors_by_prefix(manifest)],
        "aliases": manifest.aliases,
        "memory_formats": manifest.memory_formats,
        "fingerprints": manifest.fingerprints,
        "versions": manifest.versions,
        "seconds": manifest.seconds,
        "format": manifest.format,
        "run_id": manifest.run_id,
    }
    return {**facts, **about}
