"""`elasticflow submit slurm JOB`: a batch script, passed to sbatch, printed or written."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import JOB_FILE, RUN_ID, case_option, overrides_option
from elasticflow.cli.train.run_options import run_id_of
from elasticflow.cli.train.submit_group import print_options, write_out

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.clusters.slurm.commands import QueuedJob
    from elasticflow.run_folder import RunFolder

_LOOK_S = 2.0
# Slurm has looked at a new job after about a second; until then squeue gives no reason for which it waits, or this one.
_REASON_S, _NO_REASON = 2.0, {"None", "", "PartitionConfig"}


@click.command("slurm")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@print_options
@click.option(
    "--run-id",
    type=RUN_ID,
    metavar="ID",
    help="The run, made or resumed; default: slurm-JOBID, a new one for each submission.",
)
@case_option
@overrides_option
@click.option(
    "--wait",
    "is_waiting",
    is_flag=True,
    help="Report on the job until it is over, and exit with the run's exit code; Ctrl-C only ends the report.",
)
def command(
    job_file: Path,
    target: Path | None,
    run_id: str | None,
    case: str | None,
    overrides: tuple[str, ...],
    *,
    is_printed: bool,
    is_waiting: bool,
) -> int:
    """Submit a job to Slurm as a batch script, and print the id of its run.

    The script starts the nodes, stops them before the time limit, and requeues itself. [slurm] in the job file gives
    the options of sbatch. The nodes need the project and this `elasticflow` at the same paths as on this machine.

    status, logs, why, report and cancel work wherever the project's folder is, such as on the login node. To continue a
    run whose job is over, submit it again with its --run-id.

    \b
    elasticflow submit slurm jobs/mnist.toml
    elasticflow submit slurm jobs/mnist.toml --wait
    elasticflow submit slurm jobs/mnist.toml --run-id slurm-4711   continue with that run
    elasticflow submit slurm jobs/mnist.toml -o mnist.sbatch       to read, then: sbatch mnist.sbatch
    elasticflow submit slurm jobs/mnist.toml --set slurm.time="4 h" --print
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.clusters.slurm.commands import submit
    from elasticflow.clusters.slurm.refusals import never_starts, refusal
    from elasticflow.clusters.slurm.render import render_slurm
    from elasticflow.errors import FINISHED, JobRefusedError, SlurmRefusedError
    from elasticflow.jobfile.diagnostics.render_text import render
    from elasticflow.jobfile.load import require_job
    from elasticflow.run_folder import RunFolder

    # Variables are looked up on the nodes, not here.
    loaded = require_job(job_file, overrides, case=case, environment=None)
    whole_id = run_id and run_id_of(run_id, case)
    script = render_slurm(loaded, overrides, whole_id)
    show_warnings(loaded)
    if is_printed or target is not None:
        if is_waiting:
            raise click.UsageError(
                "--wait is about a job that is submitted, and --print and --output submit none"
            )
        write_out(script, target, "sbatch")
        return FINISHED
    name = loaded.job.job.name
    if whole_id is not None:
        # The run is wanted again.
        RunFolder.of(loaded.project_root, name, whole_id).cancel.unlink(missing_ok=True)
    assert loaded.job.slurm is not None
    output = loaded.job.slurm.output.rpartition("/")[0].replace("%x", name)
    if (
        output and "%" not in output
    ):  # Slurm makes no folder, and ends a job at once if the folder of its output is missing
        (loaded.project_root / output).mkdir(parents=True, exist_ok=True)
    try:
        number = submit(script)
    except SlurmRefusedError as error:
        raise JobRefusedError(render([refusal(error.message, loaded.job.slurm, loaded.source)])) from error
    folder = RunFolder.of(loaded.project_root, name, whole_id or run_id_of(f"slurm-{number}", case))
    click.echo(f"Slurm job {number} is queued: run {folder.run_id}")
    reason = _reason_to_wait(number)
    if (problem := never_starts(number, reason, loaded.job.slurm, loaded.source)) is not None:
        click.echo(render([problem]), err=True)
    if is_waiting:
        return _follow(number, folder)
    for line, what in (
        (f"squeue --jobs {number}", "whether it waits, and why"),
        (f"elasticflow status {folder.run_id}", "how the run does, once it has begun"),
        (f"elasticflow logs {folder.run_id}", "what its workers print"),
        (f"elasticflow cancel {folder.run_id}", "leave with a snapshot; the job is not queued again"),
        (f"scancel {number}", "the same, for a job that waits"),
    ):
        click.echo(f"  {line:<42} {what}")
    return FINISHED


def _reason_to_wait(number: int) -> str:
    """Return squeue's reason for which a new job waits; empty if it does not wait, or squeue does not tell."""
    from elasticflow.clusters.slurm.commands import queued
    from elasticflow.errors import SlurmRefusedError, SubmitError
    from elasticflow.system.polling import attempts

    reason = ""
    with suppress(SubmitError, SlurmRefusedError):
        for _ in attempts(_REASON_S, _REASON_S / 4):
            waiting = [part.detail for part in queued(number) if part.state == "PENDING"]
            reason = waiting[0] if waiting else ""
            if not waiting or reason not in _NO_REASON:
                break
    return reason


def _follow(number: int, folder: RunFolder) -> int:
    """Report on a Slurm job and its run until the job is over; return the run's exit code."""
    from elasticflow.cli.look.status import exit_code_of
    from elasticflow.clusters.slurm.commands import queued
    from elasticflow.errors import NOT_STARTED
    from elasticflow.observe.status import read_status

    told = ""
    while parts := queued(number):
        states = sorted({part.state for part in parts})
        text = ", ".join(f"{state} ({_details(parts, state)})" for state in states)
        if folder.state.exists():
            status = read_status(folder)
            text += f"; run {status.status}, launch {status.launch}"
        if text != told:
            click.echo(f"job {number}: {text}", err=True)
            told = text
        time.sleep(_LOOK_S)
    if not folder.path.is_dir():
        click.echo(
            f"job {number} is over, and its run has not begun: see the file of its output (slurm.output)",
            err=True,
        )
        return NOT_STARTED
    status = read_status(folder)
    at = "" if status.has_no_steps else f" at step {status.progress}"
    click.echo(f"run {folder.run_id} is {status.status}{at}")
    return exit_code_of(status)


def _details(parts: list[QueuedJob], state: str) -> str:
    found = {part.detail for part in parts if part.state == state}
    return ", ".join(sorted(found)[:4]) or "-"
