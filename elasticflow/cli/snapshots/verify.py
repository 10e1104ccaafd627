"""`elasticflow snapshots verify [RUN] [SNAPSHOT...]`: checks every byte of snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import ProgressMeter, paint, print_json
from elasticflow.cli.snapshots.selection import (
    find,
    find_named,
    find_rows,
    form_options,
    option_option,
    store_errors,
    words_argument,
)
from elasticflow.errors import ANSWER_IS_NO, FINISHED, SnapshotNotFoundError
from elasticflow.observe.snapshots.rows import LATEST
from elasticflow.observe.terminal.formats import size, span
from elasticflow.snapshots.format.manifest import RemovedSnapshotError
from elasticflow.snapshots.read import verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow


@dataclass(frozen=True)
class VerifyResult:
    """Result for one snapshot.

    Attributes:
        whole: Every byte is as it was written.
        problems: Problems, by file.
        set_aside: The snapshot is set aside, now or before.
        needed_by: Other snapshots that need one of the damaged files, and cannot be loaded either.
    """

    name: str
    whole: bool
    bytes: int
    seconds: float
    problems: dict[str, str]
    set_aside: bool
    needed_by: list[str]


@click.command("verify")
@words_argument("[RUN] [SNAPSHOT]...")
@click.option("--all", "is_all", is_flag=True, help="Verify every snapshot that could be restored.")
@click.option(
    "--quarantine", is_flag=True, help="Set damaged snapshots aside, so that nothing ever loads them."
)
@option_option
@form_options
def command(
    words: tuple[str, ...], options: tuple[str, ...], form: str, *, is_all: bool, quarantine: bool
) -> int:
    """Read every byte of snapshots and compare it with the checksums from the time of writing.

    Without a SNAPSHOT: the newest. Exit code 1 if one is damaged; the command names the file, the block,
    and the other snapshots that need the file.

    \b
    elasticflow snapshots verify
    elasticflow snapshots verify mnist step:500 step:1000
    elasticflow snapshots verify s3://bucket/mnist/20261120-104500-4f2a --all --quarantine
    """
    source, names = find(words, options)
    if names and is_all:
        raise click.UsageError("--all or names of snapshots, not both")
    rows = find_rows(source)
    chosen = [row for row in rows if row.state not in {"set aside", "unfinished"}]
    if not is_all:
        chosen = [find_named(source, rows, name) for name in names or [LATEST]]
    results = []
    for row in chosen:
        try:
            result = _verify(source, row, rows, quarantine=quarantine)
        except (RemovedSnapshotError, SnapshotNotFoundError) as error:
            # A run that trains removes snapshots meanwhile: the others are read all the same; so are they beside another version's.
            if not is_all:
                raise
            click.echo(f"warning: {error.message}", err=True)
            continue
        results.append(result)
        if form == "text":
            _print(result)
    if form == "json":
        print_json([asdict(result) for result in results])
    if all(result.whole for result in results):
        return FINISHED
    if form == "text" and not all(result.whole or result.set_aside for result in results):
        click.echo("help: --quarantine sets damaged snapshots aside, so that nothing loads them", err=True)
    return ANSWER_IS_NO


def _verify(
    source: SnapshotSource, row: SnapshotRow, rows: list[SnapshotRow], *, quarantine: bool
) -> VerifyResult:
    problems, nbytes, seconds = {}, 0, 0.0
    if row.state == "other version":
        raise SnapshotNotFoundError(
            f"{row.name} is not verified: {row.reason}", "verify it with that version"
        )
    if row.manifest is None:
        problems = {"MANIFEST.json": row.reason or row.state}
    else:
        nbytes = sum(entry.size for entry in row.manifest.locations().values())
        with store_errors(), ProgressMeter(row.name, nbytes) as meter:
            lines = verify.verify(source.catalog, row.manifest, meter)
            seconds = round(meter.seconds, 6)
        problems = {file: why for file, _, why in (text.partition(": ") for text in lines)}
    is_aside = row.state == "set aside"
    if problems and quarantine and row.state in {"committed", "damaged"}:
        with store_errors("set aside"):
            source.catalog.quarantine(row.name, "; ".join(f"{file}: {why}" for file, why in problems.items()))
        is_aside = True
    needed_by = _needing(row, rows, problems)
    return VerifyResult(row.name, not problems, nbytes, seconds, problems, is_aside, needed_by)


def _needing(damaged: SnapshotRow, rows: list[SnapshotRow], files: Iterable[str]) -> list[str]:
    locations = {file if "/" in file else f"{damaged.name}/{file}" for file in files}
    return [
        row.name
        for row in rows
        if row is not damaged
        and row.manifest is not None
        and not locations.isdisjoint(row.manifest.locations())
    ]


def _print(result: VerifyResult) -> None:
    if result.whole:
        rate = f" ({size(result.bytes / result.seconds)}/s)" if result.seconds else ""
        aside = ", but set aside" if result.set_aside else ""
        took = f"{size(result.bytes)} in {span(result.seconds)}{rate}{aside}"
        click.echo(f"{result.name}  {paint('whole', 'green')}    {took}")
        return
    for file, why in result.problems.items():
        click.echo(f"{result.name}  {paint('damaged', 'red')}  {file}: {why}")
    if result.needed_by:
        others = ", ".join(result.needed_by)
        click.echo(f"{result.name}  {paint('damaged', 'red')}  and cannot be loaded either: {others}")
    if result.set_aside:
        click.echo(f"{result.name}  {paint('set aside', 'yellow')}")
