"""`elasticflow metrics [RUN]`: the measurements of a run, as a table or as curves."""

from __future__ import annotations

import sys
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import paint, print_json, shortest_path, show_damage, table, terminal_width
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.curves import NOT_MEASURED, read_curves
from elasticflow.observe.records import parse
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.colours import speaks_utf8
from elasticflow.observe.terminal.formats import number
from elasticflow.system.json_lines import lines_from_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

_TAIL = 20
_PLOT_HEIGHT, _PLOT_WIDTH = 12, 80
# These fields come first and unchanged; the other fields of a line are quantities.
_FIRST = ("step", "epoch")
_HIDDEN = NOT_MEASURED - {*_FIRST, "best"}


@click.command("metrics")
@click.argument("run", type=RUN, required=False)
@click.option("--only", multiple=True, metavar="NAME", help="Quantity to show; * stands for any text.")
@click.option("--tail", type=click.IntRange(min=0), default=_TAIL, show_default=True, help="Lines; 0: all.")
@click.option("--plot", is_flag=True, help="Draw curves over all steps.")
@format_option
def command(*, run: str | None, only: tuple[str, ...], tail: int, plot: bool, form: str) -> None:
    """Show the measurements of RUN: loss, evaluations and all others, the newest last.

    RUN is a run folder, a run id, or a job's name; default: the newest run. Steps that were lost and repeated appear
    once, with the values that count.

    \b
    elasticflow metrics
    elasticflow metrics mnist --plot --only loss --only "eval *"
    elasticflow metrics mnist --tail 0 --format json
    """
    folder = find_run(current_project_root(), run, by_hand=True)
    show_damage(folder)
    if plot:
        if form == "json":
            raise click.UsageError("--plot draws for people: a program gets the values without it")
        _plot(folder, only)
        return
    records = _newest(folder.metrics, tail, only)
    if form == "json":
        print_json(records)
    elif not records and only and _newest(folder.metrics, 1, ()):
        _say_no_such(folder, (name for record in _from_end(folder.metrics) for name, _ in _flat(record)))
    elif not records:
        why = ""
        if read_status(folder).has_no_steps:
            why = (
                ": its script tells no steps, as it would with elasticflow.join (elasticflow guide own-loop)"
            )
        click.echo(f"nothing was measured yet in {shortest_path(folder.path)}{why}", err=True)
    else:
        click.echo("\n".join(_table(records)))


def _newest(path: Path, count: int, only: Sequence[str]) -> list[Record]:
    """Return the last *count* records (0: all), the oldest first; *only*: names of quantities, empty for all."""
    records = _from_end(path)
    chosen = (_chosen(record, only) for record in records) if only else records
    return list(islice(filter(None, chosen), count or None))[::-1]


def _from_end(path: Path) -> Iterator[Record]:
    with suppress(OSError):  # absent, or damaged with a warning already given
        yield from (record for _, line in lines_from_end(path) if (record := parse(line)) is not None)


def _chosen(record: Record, only: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return the record with *only* these quantities, and its place; empty if it has none of them."""
    chosen: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            inner = _chosen(value, only, _inside(prefix, name))
            chosen |= {name: inner} if inner else {}
        elif (prefix or name not in {*_HIDDEN, *_FIRST}) and _is_asked_for(f"{prefix}{name}", only):
            chosen[name] = value
    place = {name: record[name] for name in _FIRST if name in record}
    return place | chosen if chosen and not prefix else chosen


def _is_asked_for(name: str, only: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in only)


def _inside(prefix: str, name: str) -> str:
    return f"{prefix}{name.replace('_', ' ')} "


def _table(records: Sequence[Record]) -> Iterator[str]:
    rows = [dict(_flat(record)) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _FIRST))
    cells = [
        (*(str(row.get(name, "-")) for name in _FIRST), *(number(row.get(name)) for name in names))
        for row in rows
        if any(name in row for name in names)
    ]
    header = ["step", "epochs", *names]  # the epochs that are finished
    yield from table(
        header, cells, width=terminal_width(), first_to_go=list(reversed(names[1:])), justify="right"
    )


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, _inside(prefix, name))
        elif prefix or name not in _HIDDEN:
            yield f"{prefix}{name}", value


def _plot(folder: RunFolder, only: Sequence[str]) -> None:
    from elasticflow.observe.terminal.plot import plot

    pretty = speaks_utf8(sys.stdout)
    measured = read_curves(folder.metrics, folder.metrics_redone)
    curves = [curve for curve in measured if _is_asked_for(curve.name, only or ("loss", "eval *"))]
    for curve in curves:
        points = [point for segment in curve.segments for point in segment.points]
        if points:
            click.echo(f"{paint(curve.name, bold=True)}  {number(curve.last)}")
            click.echo(
                "\n".join(plot(points, terminal_width() or _PLOT_WIDTH, _PLOT_HEIGHT, pretty=pretty)) + "\n"
            )
        else:
            click.echo(f"{paint(curve.name, bold=True)}  no finite number\n")
    if not curves:
        _say_no_such(folder, (curve.name for curve in measured))


def _say_no_such(folder: RunFolder, names: Iterable[str]) -> None:
    click.echo(f"nothing of that name was measured in {shortest_path(folder.path)}", err=True)
    if there := ", ".join(sorted(set(names).difference(_FIRST))):
        click.echo(f"help: there are: {there}", err=True)
