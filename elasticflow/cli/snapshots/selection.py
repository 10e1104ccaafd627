"""Shared parts of the `snapshots` commands: options, and the run and snapshots that the command line names."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.parameters import RUN_AND_SNAPSHOTS, RUN_WORD, format_option
from elasticflow.errors import SnapshotError, SnapshotNotFoundError, StorageError
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.snapshots.locate import find_source
from elasticflow.observe.snapshots.rows import LATEST, is_selector, pick_row, rows_of
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, OtherVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow

_ASSIGNMENT = re.compile(r"(?P<keys>[\w.-]+)\s*=(?P<value>.*)", re.DOTALL)


def words_argument(metavar: str) -> Callable[[Any], Any]:
    """Return the argument that takes a run and snapshots in any order; *metavar* is its name in `--help`."""
    kind = RUN_AND_SNAPSHOTS if "SNAPSHOT" in metavar else RUN_WORD
    return click.argument("words", type=kind, metavar=metavar, nargs=-1)


option_option = click.option(
    "--option",
    "options",
    metavar="KEY=VALUE",
    multiple=True,
    help="Option of the file system, e.g. anon=true; credentials come from the environment.",
)


def form_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--format text|json`, and `--json` for short."""
    command = click.option("--json", "form", flag_value="json", help="The same as --format json.")(command)
    return format_option(command)


def find(words: Sequence[str], options: Sequence[str]) -> tuple[SnapshotSource, list[str]]:
    """Return the run that *words* name, and the names of snapshots among them as typed.

    Raises:
        UsageError: more than one word is a run, or an option is no assignment.
        RunNotFoundError: there is no such run.
        StorageError: the run's snapshots cannot be read.
    """
    names = [word for word in words if is_selector(word)]
    runs = [word for word in words if not is_selector(word)]
    if len(runs) > 1:
        raise click.UsageError(
            f'"{runs[0]}" and "{runs[1]}" cannot both be the run; '
            "a snapshot is named in full, or as latest, best or step:N"
        )
    with store_errors():
        source = find_source(current_project_root(), runs[0] if runs else None, _assignments(options))
    for damage in source.damage:
        click.echo(f"warning: {damage}", err=True)
    return source, [*names, *([source.name] if source.name else [])]


def find_rows(source: SnapshotSource) -> list[SnapshotRow]:
    """Return the run's snapshots, the newest first.

    Raises:
        StorageError: the snapshots cannot be read.
    """
    with store_errors():
        return rows_of(source)


def find_one(source: SnapshotSource, rows: Sequence[SnapshotRow], names: Sequence[str]) -> SnapshotRow:
    """Return the snapshot that is named; without a name, the newest committed one.

    Raises:
        UsageError: there is more than one name.
        SnapshotNotFoundError: there is no such snapshot.
    """
    if len(names) > 1:
        raise click.UsageError(f'one snapshot at a time: "{names[0]}" or "{names[1]}"')
    return find_named(source, rows, names[0] if names else LATEST)


def find_named(source: SnapshotSource, rows: Sequence[SnapshotRow], name: str) -> SnapshotRow:
    """Return the snapshot that *name* stands for.

    Raises:
        SnapshotNotFoundError: there is no such snapshot; the message says where it was looked for.
    """
    try:
        return pick_row(rows, name, source.rules)
    except SnapshotNotFoundError as error:
        raise SnapshotNotFoundError(f"{source.label}: {error.message}", error.remedy) from None


def required(names: Sequence[str], command: str) -> Sequence[str]:
    """Return *names* if there are any.

    Raises:
        UsageError: *names* is empty.
    """
    if not names:
        raise click.UsageError(
            f"which snapshot? Give a name, latest, best or step:N: elasticflow snapshots {command} latest"
        )
    return names


@contextlib.contextmanager
def store_errors(doing: str = "read") -> Iterator[None]:
    """Turn a failure of the store into a one-line error with a remedy; errors about snapshots that are damaged or of another version pass unchanged.

    Raises:
        StorageError: the store failed.
    """
    try:
        yield
    except (DamagedSnapshotError, OtherVersionError):
        raise
    except (OSError, SnapshotError) as error:
        raise StorageError(
            f"the snapshots cannot be {doing}: {getattr(error, 'message', error)}",
            "check the address and its credentials, then try again",
        ) from error


def _assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the nested options in texts like `a.b=1`; a value that is not TOML is taken as a text."""
    import tomli

    options: dict[str, Any] = {}
    for text in texts:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            raise click.BadParameter(f'"{text}" is not KEY=VALUE', param_hint="--option")
        *tables, key = match["keys"].split(".")
        inner = options
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(
                    f"{table} has a value, and cannot have {key} in it", param_hint="--option"
                )
        try:
            inner[key] = tomli.loads(f"value = {match['value']}")["value"]
        except tomli.TOMLDecodeError:
            inner[key] = match["value"].strip()
    return options
