"""`elasticflow resume [RUN]`: the next launch of a run that can go on (floor 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.options import job_of
from elasticflow.cli.view import log_format_option, shown, warn

if TYPE_CHECKING:
    from elasticflow.launcher.launch import Request


@click.command("resume")
@click.argument("run", metavar="[RUN]", required=False)
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key for this launch."
)
@click.option("--accept-drift", is_flag=True, help="Go on although the job changed the trajectory.")
@log_format_option
def command(run: str | None, overrides: tuple[str, ...], accept_drift: bool, log_format: str) -> int:
    """Go on with RUN (a run folder, run id or job name) from its newest good snapshot.

    Without RUN: the newest run of this project that is not finished. The job file is read again and compared
    with what the run was started with; what would corrupt the run is refused.

    \b
    elasticflow resume
    elasticflow resume mnist
    elasticflow resume 20261120-104500-4f2a --set nodes.nproc_per_node=1
    """
    from elasticflow.launcher.launch import launch

    request = _request(run, overrides, accept_drift=accept_drift)
    click.echo(f"resuming run {request.folder.run_id} of job {request.folder.job}", err=True)
    with shown(log_format, request.folder.path) as show:
        return launch(request, show, warn)


def _request(run: str | None, overrides: tuple[str, ...], *, accept_drift: bool) -> Request:
    from elasticflow.compiler.importable import require_importable
    from elasticflow.compiler.materialize import (
        read_job,
        recorded_case,
        recorded_files,
        recorded_overrides,
    )
    from elasticflow.errors import NothingToResumeError
    from elasticflow.launcher.launch import Request
    from elasticflow.observe.runs import find_run, is_finished, newest_resumable
    from elasticflow.spec.project import here

    root = here()
    folder = newest_resumable(root) if run is None else find_run(root, run)
    if folder is None:
        raise NothingToResumeError(
            f"no run under {root / 'runs'} can go on", "start one: elasticflow run JOB"
        )
    if is_finished(folder):
        raise NothingToResumeError(f"run {folder.run_id} is finished", "start a new one: elasticflow run JOB")
    numbers = folder.launch_numbers()
    if not numbers:
        raise NothingToResumeError(f"run {folder.run_id} was never started", "start it: elasticflow run JOB")
    before = folder.launch(numbers[-1])
    root = folder.path.parents[2]
    files = tuple(root / name for name in recorded_files(before))
    overrides = (*recorded_overrides(before), *overrides)
    case = recorded_case(before)
    if not files[0].exists():
        if overrides != recorded_overrides(before):
            raise NothingToResumeError(
                f"--set needs the job file, and {files[0]} is gone", "put it back, or leave out --set"
            )
        warn(f"{files[0]} is gone; going on with the job as recorded in {before}")
        return Request(read_job(before), files, overrides, root, folder, accept_drift, case=case)
    loaded = job_of(files[0], overrides, case)
    assert loaded.job is not None
    require_importable(loaded)
    return Request(loaded.job, loaded.files, overrides, root, folder, accept_drift, case=case)
