"""`elasticflow compile JOB -o DIR`: write the files of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import FOLDER, JOB_FILE, case_option, job_of, overrides_option

if TYPE_CHECKING:
    from pathlib import Path


@click.command("compile")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option(
    "-o", "--output", "folder", metavar="DIR", required=True, type=FOLDER, help="Folder for the files."
)
@case_option
@overrides_option
@click.option("--force", is_flag=True, help="Replace files that were edited or are not ours.")
def command(
    job_file: Path, folder: Path, case: str | None, overrides: tuple[str, ...], *, force: bool
) -> None:
    """Write a job's launch folder: train.py, torchrun.sh, plan.json and the files they are made from.

    \b
    elasticflow compile jobs/mnist.toml -o build
    bash build/torchrun.sh      plain torchrun, no elasticflow command
    python build/train.py       one process
    elasticflow compile jobs/sweep.toml --case lr0.001-seed1 -o build
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.compiler import compile_job

    loaded = job_of(job_file, overrides, case)
    assert loaded.job is not None
    compile_job(loaded.job, loaded.files, loaded.project_root, overrides, case).write(folder, force=force)
    show_warnings(loaded)
    if loaded.job.script is not None:
        click.echo(f"wrote {folder}: torchrun.sh, torchrun.args, plan.json, job.json, sources/")
        click.echo(f"  the script by plain torchrun: bash {folder}/torchrun.sh")
        return
    click.echo(f"wrote {folder}: train.py, torchrun.sh, torchrun.args, plan.json, job.json, sources/")
    click.echo(f"  several workers: bash {folder}/torchrun.sh")
    click.echo(f"  one process:     python {folder}/train.py")
