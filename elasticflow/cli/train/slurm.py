"""`elasticflow render slurm JOB`: a batch script for sbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import JOB_FILE, RUN_ID, case_option, output_option, overrides_option
from elasticflow.cli.train.run_options import run_id_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob

run_id_option = click.option(
    "--run-id",
    type=RUN_ID,
    metavar="ID",
    help="The run, made or resumed; default: slurm-JOBID, a new one for each submission.",
)


@click.command("slurm")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@output_option
@run_id_option
@case_option
@overrides_option
def command(
    job_file: Path, target: Path | None, run_id: str | None, case: str | None, overrides: tuple[str, ...]
) -> None:
    """Write a job as a batch script, which starts the nodes, stops them before the time limit, and requeues itself.

    [slurm] in the job file gives the options of sbatch. The nodes need the project and this `elasticflow` at the same
    paths as on this machine.

    \b
    elasticflow render slurm jobs/mnist.toml -o mnist.sbatch
    elasticflow render slurm jobs/mnist.toml | sbatch
    elasticflow render slurm jobs/mnist.toml --set slurm.time="4 h" --set slurm.partition=gpu
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.clusters.slurm.render import render_slurm
    from elasticflow.system import atomic_files

    loaded = loaded_for_slurm(job_file, overrides, case, run_id)
    text = render_slurm(loaded, overrides, run_id and run_id_of(run_id, case))
    show_warnings(loaded)
    if target is None:
        click.echo(text, nl=False)
    else:
        atomic_files.write(target, (text.encode(),))
        click.echo(f"wrote {target}: sbatch {target}")


def loaded_for_slurm(
    job_file: Path, overrides: tuple[str, ...], case: str | None, run_id: str | None
) -> LoadedJob:
    """Return the job for a script; its variables are looked up on the nodes, not here.

    Raises:
        JobRefusedError: the job has errors.
        BadParameter: the run id has a character that is not allowed.
    """
    from elasticflow.jobfile.load import require_job
    from elasticflow.run_folder import RUN_ID as FORM_OF_ID

    if run_id is not None and not FORM_OF_ID.fullmatch(run_id):
        raise click.BadParameter("letters, digits, '.', '_' and '-' only, at most 100", param_hint="--run-id")
    return require_job(job_file, overrides, case=case, environment=None)
