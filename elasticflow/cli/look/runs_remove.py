"""`elasticflow runs rm` and `elasticflow runs prune`: remove runs with their whole folders."""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import agreed, paint, table, terminal_width
from elasticflow.cli.parameters import DURATION, JOB_NAME, RUN, dry_run_option, yes_option
from elasticflow.errors import ANSWER_IS_NO, FINISHED, ElasticflowError
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.runs import find_run, list_runs
from elasticflow.observe.status import is_locked, read_status
from elasticflow.observe.terminal.formats import local_time, plural, size
from elasticflow.run_folder import recorded_place, step_of
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.run_folder import RunFolder

_STATUSES = ("finished", "interrupted", "failed")
_pinned_option = click.option("--pinned", is_flag=True, help="Also runs with pinned snapshots.")


class Going:
    """A run to remove: its state, the bytes in its folder, and its pinned snapshots."""

    def __init__(self, folder: RunFolder) -> None:
        files = [path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
        self.folder, self.status = folder, read_status(folder)
        self.bytes = sum(path.stat().st_size for path in files)
        self.pinned = sum(path.parent == folder.path / "pins" and path.suffix == ".json" for path in files)


@click.command("rm")
@click.argument("runs", type=RUN, metavar="RUN...", nargs=-1, required=True)
@dry_run_option
@_pinned_option
@yes_option
def rm(runs: tuple[str, ...], *, dry_run: bool, pinned: bool, yes: bool) -> int:
    """Remove runs: their folders with snapshots, logs and metrics.

    RUN is a run folder, a run id, or a job's name (its newest run). The command shows what it will remove, and asks for
    confirmation. It refuses a run that is running, and without --pinned one with pinned snapshots. Snapshots at a URL
    stay.

    \b
    elasticflow runs rm 20261120-104500-4f2a
    elasticflow runs rm first second --dry-run
    """
    root = current_project_root()
    folders = {folder.path: folder for folder in (find_run(root, run) for run in runs)}
    for path, folder in folders.items():
        if is_locked(folder):  # its files come and go while they would be counted
            raise ElasticflowError(f"{path} is running", f"end it first: elasticflow cancel {folder.run_id}")
    return _remove([Going(folder) for folder in folders.values()], dry_run=dry_run, pinned=pinned, yes=yes)


@click.command("prune")
@click.argument("job", type=JOB_NAME, required=False)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="The newest N of each job stay.")
@click.option(
    "--older-than",
    type=DURATION,
    metavar="TIME",
    help='Only runs without a sign of life for this long: "30 d", "12 h".',
)
@click.option("--status", type=click.Choice(_STATUSES), multiple=True, help="Only runs with this status.")
@dry_run_option
@_pinned_option
@yes_option
def prune(
    job: str | None,
    keep: int | None,
    older_than: str | None,
    status: tuple[str, ...],
    *,
    dry_run: bool,
    pinned: bool,
    yes: bool,
) -> int:
    """Remove the runs of the project, or of one JOB, that meet all given rules; at least one rule is needed.

    Runs that are running stay, and without --pinned also runs with pinned snapshots. Snapshots at a URL stay.

    \b
    elasticflow runs prune --older-than "30 d"
    elasticflow runs prune mnist --keep 5 --dry-run
    elasticflow runs prune --status failed --older-than "1 d" --yes
    """
    if keep is None and older_than is None and not status:
        raise click.UsageError('say which runs: --keep N, --older-than "30 d" or --status failed')
    oldest = None if older_than is None else time.time() - parse_duration(older_than)
    kept: dict[str, int] = {}
    going = []
    for folder in list_runs(current_project_root(), job):  # the newest first
        kept[folder.job] = kept.get(folder.job, 0) + 1
        if is_locked(folder) or (keep is not None and kept[folder.job] <= keep):
            continue
        run = Going(folder)
        if (
            (oldest is None or (run.status.updated or folder.path.stat().st_mtime) < oldest)
            and (not status or run.status.status in status)
            and (pinned or not run.pinned)
        ):
            going.append(run)
    return _remove(going, dry_run=dry_run, pinned=True, yes=yes)


def _remove(going: Sequence[Going], *, dry_run: bool, pinned: bool, yes: bool) -> int:
    """Show the runs, ask, and remove them; nothing is removed if one of the runs must stay."""
    if not going:
        click.echo("no run meets the rules")
        return FINISHED
    _print(going)
    for run in going:
        if run.pinned and not pinned:
            raise ElasticflowError(
                f"{run.folder.path} has {plural(run.pinned, 'pinned snapshot')}",
                "they go with it: say --pinned, or unpin them",
            )
    if dry_run:
        return FINISHED
    total = size(sum(run.bytes for run in going))
    if not yes and not agreed(f"Remove {plural(len(going), 'run')} ({total})?"):
        return ANSWER_IS_NO
    for run in going:
        _remove_folder(run.folder)
    click.echo(f"removed {plural(len(going), 'run')}, {total} freed")
    return FINISHED


def _print(going: Sequence[Going]) -> None:
    header = ("RUN", "JOB", "STATUS", "STEP", "NEWEST SNAPSHOT", "LAST SEEN", "SIZE")
    rows = [
        (
            run.folder.run_id,
            run.folder.job,
            run.status.status,
            str(run.status.step),
            f"step {step_of(run.status.snapshot)}" if run.status.snapshot else "-",
            local_time(run.status.updated),
            size(run.bytes),
        )
        for run in going
    ]
    click.echo("\n".join(table(header, rows, width=terminal_width(), first_to_go=("LAST SEEN", "STEP"))))
    for run in going:
        place, prefix = recorded_place(run.folder)
        if prefix:
            text = f"{run.folder.run_id}: its snapshots at {place.rstrip('/')}/{prefix} stay"
            click.echo(paint(text, "yellow"))


def _remove_folder(folder: RunFolder) -> None:
    """Remove a run's folder: other processes see all of it or nothing, and cannot launch it meanwhile."""
    from elasticflow.launcher.journal.run_lock import locked

    hidden = folder.path.with_name(f".removed-{secrets.token_hex(4)}")
    with locked(folder):
        folder.path.rename(hidden)
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        raise ElasticflowError(
            f"{hidden} could not be removed: {error}", "remove it by hand: it is no run any more"
        ) from error
    with suppress(OSError):  # the job has other runs
        folder.path.parent.rmdir()
