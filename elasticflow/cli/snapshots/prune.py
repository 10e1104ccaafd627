"""`elasticflow snapshots prune [RUN]`: remove the snapshots that no rule keeps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import ProgressMeter, agreed, paint, print_json
from elasticflow.cli.parameters import DURATION, INTERVAL, dry_run_option, yes_option
from elasticflow.cli.snapshots.selection import (
    find,
    form_options,
    option_option,
    store_errors,
    words_argument,
)
from elasticflow.errors import ANSWER_IS_NO, FINISHED
from elasticflow.observe.snapshots.rows import ordered_reasons
from elasticflow.observe.status import is_locked
from elasticflow.observe.terminal.formats import plural, size
from elasticflow.protocol.snapshot_settings import Keep
from elasticflow.snapshots.tools import prune

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.snapshots.format.manifest import Manifest


@click.command("prune")
@words_argument("[RUN]")
@click.option("--keep-last", "last", type=click.IntRange(min=1), metavar="N", help="The newest N stay.")
@click.option(
    "--keep-best", "best", type=click.IntRange(min=1), metavar="N", help="The best N by metric stay."
)
@click.option(
    "--keep-every",
    "every",
    type=INTERVAL,
    metavar="INTERVAL",
    help='The first one from each multiple on stays: "5000 steps", "1 epoch".',
)
@click.option(
    "--keep-within",
    "within",
    type=DURATION,
    metavar="TIME",
    help='Those at most this much older than the newest stay: "2 h".',
)
@dry_run_option
@yes_option
@option_option
@form_options
def command(
    words: tuple[str, ...], options: tuple[str, ...], form: str, *, dry_run: bool, yes: bool, **keep: Any
) -> int:
    """Remove the snapshots of RUN that no rule keeps, and unfinished files of dead writers.

    The rules are those of the job; with any --keep option, those options alone. Whatever the rules, the newest
    snapshot that verifies and its parent stay, as do pinned snapshots, and snapshots that others borrow files from.
    A run that is running is refused. For a URL, --yes is needed, as a run may be using it unseen.

    \b
    elasticflow snapshots prune --dry-run
    elasticflow snapshots prune mnist --keep-last 1 --keep-best 3
    elasticflow snapshots prune s3://bucket/mnist/20261120-104500-4f2a --keep-last 2 --yes
    """
    source, names = find(words, options)
    if names:
        raise click.UsageError(
            f"prune takes rules, not names; to keep one: elasticflow snapshots pin {names[0]}"
        )
    rules = _rules(source, **keep)
    # A dry run takes no lock, so the run may be running.
    is_alone = source.folder is not None and not (dry_run and is_locked(source.folder))
    with contextlib.nullcontext() if dry_run else _alone(source, yes=yes), store_errors("pruned"):
        # The newest generation that certainly has no writer any more; if the run may be running, the one before.
        dead = source.catalog.newest_generation() - (0 if is_alone else 1)
        pruning = prune.plan(source.catalog, rules, dead=dead, watch=_watch)
        if form == "text":
            _print(source, pruning)
        is_wanted = bool(pruning.going or pruning.leftovers) and not dry_run
        if is_wanted and not yes and not _agreed(pruning):
            return ANSWER_IS_NO
        removed = list(prune.carry_out(source.catalog, pruning)) if is_wanted else []
    if form == "json":
        print_json(_facts(pruning, removed, dry_run=dry_run))
    elif is_wanted:
        freed = sum(pruning.sizes[name] for name in removed)
        click.echo(f"removed {plural(len(removed), 'folder')}, {size(freed)} freed")
    return FINISHED


def _rules(source: SnapshotSource, last: int | None, best: int | None, **others: str | None) -> Keep:
    """Return the rules for snapshots that stay: those of the options, else those of the run's job."""
    of_job = source.rules
    if not any((last, best, *others.values())):
        if of_job is None:
            raise click.UsageError("no job is recorded there: say which stay, such as --keep-last 3")
        return of_job
    best_mode = None if of_job is None else of_job.best_mode
    if best is not None and best_mode is None:
        raise click.UsageError("--keep-best needs a job with evaluation.best, and none is recorded there")
    return Keep(last or 1, best, **others, best_mode=best_mode)


def _alone(source: SnapshotSource, *, yes: bool) -> AbstractContextManager[object]:
    """Return the context in which nothing launches the run."""
    from elasticflow.launcher.journal.run_lock import locked

    if source.folder is not None:
        return locked(source.folder)
    if not yes:
        raise click.UsageError(
            f"whether a run is using {source.uri} cannot be known here; if none is, say --yes (or --dry-run)"
        )
    return contextlib.nullcontext()


def _watch(snapshot: Manifest) -> ProgressMeter:
    return ProgressMeter(f"verifying {snapshot.name}", sum(e.size for e in snapshot.locations().values()))


def _agreed(pruning: prune.Pruning) -> bool:
    texts = [plural(len(pruning.going), "snapshot")] if pruning.going else []
    if pruning.leftovers:
        texts.append(plural(len(pruning.leftovers), "unfinished folder"))
    return agreed(f"Remove {' and '.join(texts)} ({size(pruning.size)})?")


def _print(source: SnapshotSource, pruning: prune.Pruning) -> None:
    click.echo(f"{paint(source.label, bold=True)}  {size(pruning.size)} to be freed")
    for name, why in sorted(pruning.staying.items(), reverse=True):
        click.echo(f"  {paint('stays', 'green')}  {name}  {', '.join(ordered_reasons(why))}")
    for name, problems in pruning.damaged.items():
        click.echo(f"  {paint('stays', 'green')}  {name}  {paint('damaged', 'red')}: {problems[0]}")
    for snapshot in pruning.going:
        click.echo(f"  {paint('goes', 'yellow')}   {snapshot.name}  {size(snapshot.size)}")
    for leftover in pruning.leftovers:
        click.echo(f"  {paint('goes', 'yellow')}   {leftover.folder}  {size(leftover.size)}, unfinished")
    if not pruning.going and not pruning.leftovers:
        click.echo("  nothing goes: a rule keeps every snapshot")


def _facts(pruning: prune.Pruning, removed: list[str], *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "staying": {name: ordered_reasons(why) for name, why in pruning.staying.items()},
        "damaged": pruning.damaged,
        "going": [{"name": snapshot.name, "bytes": snapshot.size} for snapshot in pruning.going],
        "leftovers": [{"folder": leftover.folder, "bytes": leftover.size} for leftover in pruning.leftovers],
        "bytes": pruning.size,
        "removed": removed,
    }
