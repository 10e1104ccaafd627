"""`elasticflow cancel [RUN]`: drain a run and stop it."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import run_word
from elasticflow.cli.parameters import RUN
from elasticflow.errors import ElasticflowError, NotRunningError
from elasticflow.jobfile.project import current_project_root
from elasticflow.launcher.supervisor.leave_requests import LEAVE, NOW
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import is_locked, read_status
from elasticflow.observe.terminal.formats import local_time
from elasticflow.protocol.run_files import resume_command
from elasticflow.system import atomic_files
from elasticflow.system.file_lock import holder_of

if TYPE_CHECKING:
    from elasticflow.observe.status import RunStatus
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.process_record import ProcessRecord

_POLL_S = 0.05
# Signals in quicker succession count as one: a terminal sends some signals twice.
_BETWEEN_SIGNALS_S = 0.5


@click.command("cancel")
@click.argument("run", type=RUN, required=False)
@click.option(
    "--now", is_flag=True, help="Do not wait for a snapshot: the steps since the newest one are lost."
)
def command(run: str | None, now: bool) -> None:
    """Stop RUN after its step, with a snapshot, and wait until it has ended; `resume` continues it.

    The run may be on any machine that shares its folder; a job of Slurm is not queued again. RUN is a run folder, a
    run id, or a job's name; default: the newest run.

    \b
    elasticflow cancel
    elasticflow cancel mnist --now
    """
    folder = find_run(current_project_root(), run)
    before = read_status(folder)
    supervisor = before.pid
    if supervisor is None:
        raise _not_running(before)
    # On another machine that shares the folder, the same id is another process.
    holder = holder_of(folder.lock)
    where = "" if holder is not None and holder.is_on_this_machine else " on another machine"
    click.echo(f"stopping run {folder.run_id} (process {supervisor}{where})", err=True)
    # A run that was asked before is only waited for: a second signal would end it without a snapshot.
    if now or not folder.cancel.is_file():
        is_sent = _terminate(holder)
        _leave_word(folder, NOW if now else LEAVE, is_needed=not is_sent)
        if now and is_sent:
            time.sleep(_BETWEEN_SIGNALS_S)
            if is_locked(folder):
                _terminate(holder)
    # The supervisor releases the lock after its last event is written.
    while is_locked(folder):
        time.sleep(_POLL_S)
    status = read_status(folder)
    at = "" if status.has_no_steps else f" at step {status.step}"
    click.echo(f"run {folder.run_id} is {status.status}{at}")


def _terminate(holder: ProcessRecord | None) -> bool:
    """Send SIGTERM to the supervisor; return False if it is not on this machine, or another user's."""
    with suppress(PermissionError):
        return holder is not None and holder.send(signal.SIGTERM)
    return False


def _leave_word(folder: RunFolder, word: str, *, is_needed: bool) -> None:
    """Leave *word* for a supervisor that got no signal, and for a scheduler that would start the run again.

    Raises:
        ElasticflowError: it *is_needed*, and cannot be written.
    """
    try:
        atomic_files.write(folder.cancel, (f"{word}\n".encode(),))
    except OSError as error:
        if is_needed:
            raise ElasticflowError(
                f"run {folder.run_id} cannot be asked to stop: {folder.cancel} cannot be written: {error.strerror}",
                "the user who has started the run can stop it",
            ) from error


def _not_running(status: RunStatus) -> NotRunningError:
    run = status.folder.run_id
    if status.status == "interrupted":
        again = resume_command(run_word(status.folder), status.resume_command)
        return NotRunningError(f"run {run} is not running: it was interrupted", f"continue with: {again}")
    if status.status in {"finished", "failed"}:
        ended = f"it {status.status} at {local_time(status.updated)}"
        return NotRunningError(f"run {run} is not running: {ended}", "`elasticflow runs` lists all runs")
    return NotRunningError(f"run {run} is not running here", "`elasticflow runs` lists all runs")
