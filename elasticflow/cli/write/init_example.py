"""`elasticflow init --example NAME`: writes one of the examples into a folder of its own."""

from __future__ import annotations

from pathlib import Path

import click

from elasticflow.cli.output import paint, shell_path
from elasticflow.cli.write import init_files
from elasticflow.errors import ANSWER_IS_NO, FINISHED, JobRefusedError
from elasticflow.scaffold import files, gallery


def print_job(name: str) -> int:
    """Print the example's job file, and on standard error the names of the other files that would be written."""
    contents = gallery.files_of(name)
    click.echo(contents[gallery.JOB_FILE].decode(), nl=False)
    for other in (each for each in contents if each != gallery.JOB_FILE):
        click.echo(f"note: {name}/{other} would be written too", err=True)
    return FINISHED


def finish(
    name: str, folder: Path | None, *, may_ask: bool, gitignore: bool | None, deep: bool | None
) -> int:
    """Write an example, print what it lacks here and the next commands; return the exit code.

    Args:
        folder: Target folder; None for a folder with the example's name.
        gitignore: Add the run folders to .gitignore; None to ask.
        deep: Train a step of the example.

    Raises:
        ScaffoldError: there is no such example, or a file exists already; nothing was written.
    """
    folder = folder or Path(name)
    contents = {folder / file: content for file, content in gallery.files_of(name).items()}
    files.write(contents, "choose another folder: -o FOLDER")
    for path in contents:
        click.echo(f"{paint('wrote', 'green')} {path}")
    init_files.offer_to_ignore_runs(folder, may_ask=may_ask, gitignore=gitignore)
    is_ready = _is_ready(folder / gallery.JOB_FILE, deep=bool(deep))
    init_files.say_what_is_next(
        [
            (f"cd {shell_path(folder)}", "README.md describes the example"),
            (f"elasticflow run {gallery.JOB_FILE}", "train; Ctrl-C and `elasticflow resume` at any time"),
        ]
    )
    return FINISHED if is_ready else ANSWER_IS_NO


def _is_ready(job_file: Path, *, deep: bool) -> bool:
    """Return whether the example can train on this machine, and print the obstacles."""
    from elasticflow.compiler.provenance.missing_imports import require_importable

    loaded = init_files.load(job_file)
    if deep:
        return init_files.tried_out(loaded, job_file, with_step=True)
    try:
        require_importable(loaded)
    except JobRefusedError as error:
        click.echo(f"\n{error.message}")
        return False
    return True
