"""`elasticflow resume [RUN]`: the next launch of a run that can continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import run_word, warn
from elasticflow.cli.parameters import RUN, job_of, set_option
from elasticflow.cli.train.view import launch_shown, log_format_option

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.training import TrainTable
    from elasticflow.launcher.supervisor.launch_record import Request


@click.command("resume")
@click.argument("run", type=RUN, metavar="[RUN]", required=False)
@set_option("Override one key for this launch.")
@click.option("--accept-drift", is_flag=True, help="Continue although the job changed the trajectory.")
@log_format_option
def command(run: str | None, overrides: tuple[str, ...], accept_drift: bool, log_format: str) -> int:
    """Continue RUN (a run folder, run id or job name) from its newest good snapshot.

    Without RUN: the newest run of this project that is not finished. The job file is read again and compared
    with the run's own job; a difference that would corrupt the run is refused. A finished run continues if it is given a
    greater length.

    \b
    elasticflow resume
    elasticflow resume mnist
    elasticflow resume mnist --set train.epochs=20   continues a finished run
    elasticflow resume 20261120-104500-4f2a --set nodes.nproc_per_node=1
    """
    request = _request(run, overrides, accept_drift=accept_drift)
    click.echo(f"resuming run {request.folder.run_id} of job {request.folder.job}", err=True)
    return launch_shown(request, log_format)


def _request(run: str | None, overrides: tuple[str, ...], *, accept_drift: bool) -> Request:
    from elasticflow.compiler.launch_folder import last_record
    from elasticflow.compiler.provenance.missing_imports import require_importable
    from elasticflow.errors import NothingToResumeError
    from elasticflow.jobfile.project import current_project_root
    from elasticflow.launcher.supervisor.launch_record import Request
    from elasticflow.observe.runs import find_run, is_finished, newest_resumable, way_to_train_on

    root = current_project_root()
    folder = newest_resumable(root) if run is None else find_run(root, run)
    if folder is None:
        raise NothingToResumeError(
            f"no run under {root / 'runs'} can continue", "start one: elasticflow run JOB"
        )
    is_over = is_finished(folder)
    way = way_to_train_on(folder, run_word(folder)) if is_over else ""
    over = NothingToResumeError(
        f"run {folder.run_id} is finished", f"start a new one: elasticflow run JOB{way}"
    )
    if is_over and not (way and overrides):
        raise over
    numbers = folder.launch_numbers()
    if not numbers:
        raise NothingToResumeError(f"run {folder.run_id} was never started", "start it: elasticflow run JOB")
    root = folder.project_root
    before = last_record(folder, root, warn)
    if before.files is None or not (root / before.files[0]).exists():
        missing = "the job file" if before.files is None else str(root / before.files[0])
        code = before.made.origins.code
        if code and not any((root / name).exists() for name in code):
            raise NothingToResumeError(
                f"{root} has no file of the run's project: neither {missing} nor {next(iter(code))}; was the run folder copied or moved?",
                f"resume it in its project, in runs/{before.made.job.job.name}/{folder.run_id}; status, why, logs and the like show it anywhere",
            )
        if overrides:
            raise NothingToResumeError(
                f"--set needs the job file, and {missing} is gone", "put it back, or leave out --set"
            )
        warn(f"{missing} is gone; continuing with the job as recorded in {before.place}")
        files = tuple(root / name for name in before.files or ("job.toml",))
        return Request(before.made.job, files, before.overrides, root, folder, accept_drift, case=before.case)
    overrides = (*before.overrides, *overrides)
    loaded = job_of(root / before.files[0], overrides, before.case)
    if is_over and not _is_longer(loaded.job.train, before.made.job.train):
        raise over
    require_importable(loaded)
    return Request(loaded.job, loaded.files, overrides, root, folder, accept_drift, case=before.case)


def _is_longer(train: TrainTable, before: TrainTable) -> bool:
    """Return whether training has a greater length than *before*, or one in the other unit."""
    if train.epochs is not None:
        return before.epochs is None or train.epochs > before.epochs
    return train.steps is not None and (before.steps is None or train.steps > before.steps)
