"""`elasticflow snapshots verify [RUN] [SNAPSHOT...]`: whether every byte is what was written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from elasticflow.cli.meter import Meter
from elasticflow.cli.snapshots.selection import (
    find,
    find_named,
    find_rows,
    form_options,
    option_option,
    told,
    words_argument,
)
from elasticflow.cli.terminal import paint, print_json
from elasticflow.errors import ANSWER_IS_NO, FINISHED
from elasticflow.observe.snapshots.rows import LATEST
from elasticflow.observe.terminal.formats import size, span
from elasticflow.snapshots.read import verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.observe.snapshots.locate import Place
    from elasticflow.observe.snapshots.rows import Row


@dataclass(frozen=True)
class Finding:
    """What verifying one snapshot came to.

    Attributes:
        name: The snapshot.
        whole: Whether every byte is what was written.
        bytes: Bytes read.
        seconds: That took.
        problems: What is wrong, by file.
        set_aside: Whether it is set aside, now or before.
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
@click.option("--all", "is_all", is_flag=True, help="Every snapshot that could be restored.")
@click.option("--quarantine", is_flag=True, help="Set damaged ones aside, so that nothing ever loads them.")
@option_option
@form_options
def command(
    words: tuple[str, ...], options: tuple[str, ...], form: str, *, is_all: bool, quarantine: bool
) -> int:
    """Read every byte of snapshots and compare it with the checksums taken when it was written.

    Without a SNAPSHOT: the newest. Exit code 1 if one is damaged; the file and the block are named,
    and which other snapshots need that file.

    \b
    elasticflow snapshots verify
    elasticflow snapshots verify mnist step:500 step:1000
    elasticflow snapshots verify s3://bucket/mnist/20261120-104500-4f2a --all --quarantine
    """
    place, names = find(words, options)
    if names and is_all:
        raise click.UsageError("--all or names of snapshots, not both")
    rows = find_rows(place)
    chosen = _every(rows) if is_all else [find_named(place, rows, name) for name in names or [LATEST]]
    findings = []
    for row in chosen:
        finding = _verify(place, row, rows, quarantine=quarantine)
        findings.append(finding)
        if form == "text":
            _print(finding)
    if form == "json":
        print_json([asdict(finding) for finding in findings])
    if all(finding.whole for finding in findings):
        return FINISHED
    if form == "text" and not all(finding.whole or finding.set_aside for finding in findings):
        click.echo("help: --quarantine sets damaged snapshots aside, so that nothing loads them", err=True)
    return ANSWER_IS_NO


def _every(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state in {"committed", "damaged"}]


def _verify(place: Place, row: Row, rows: list[Row], *, quarantine: bool) -> Finding:
    problems, nbytes, seconds = {}, 0, 0.0
    if row.manifest is None:
        problems = {"MANIFEST.json": row.reason or row.state}
    else:
        nbytes = sum(entry.size for entry in row.manifest.locations().values())
        with told(), Meter(row.name, nbytes) as meter:
            lines = verify.verify(place.catalog, row.manifest, meter)
            seconds = round(meter.seconds, 6)
        problems = {file: why for file, _, why in (text.partition(": ") for text in lines)}
    is_aside = row.state == "set aside"
    if problems and quarantine and row.state in {"committed", "damaged"}:
        with told("set aside"):
            place.catalog.quarantine(row.name, "; ".join(f"{file}: {why}" for file, why in problems.items()))
        is_aside = True
    needed_by = _needing(row, rows, problems)
    return Finding(row.name, not problems, nbytes, seconds, problems, is_aside, needed_by)


def _needing(damaged: Row, rows: list[Row], files: Iterable[str]) -> list[str]:
    locations = {file if "/" in file else f"{damaged.name}/{file}" for file in files}
    return [
        row.name
        for row in rows
        if row is not damaged
        and row.manifest is not None
        and not locations.isdisjoint(row.manifest.locations())
    ]


def _print(finding: Finding) -> None:
    if finding.whole:
        rate = f" ({size(finding.bytes / finding.seconds)}/s)" if finding.seconds else ""
        aside = ", but set aside" if finding.set_aside else ""
        took = f"{size(finding.bytes)} in {span(finding.seconds)}{rate}{aside}"
        click.echo(f"{finding.name}  {paint('whole', 'green')}    {took}")
        return
    for file, why in finding.problems.items():
        click.echo(f"{finding.name}  {paint('damaged', 'red')}  {file}: {why}")
    if finding.needed_by:
        others = ", ".join(finding.needed_by)
        click.echo(f"{finding.name}  {paint('damaged', 'red')}  and cannot be loaded either: {others}")
    if finding.set_aside:
        click.echo(f"{finding.name}  {paint('set aside', 'yellow')}")
