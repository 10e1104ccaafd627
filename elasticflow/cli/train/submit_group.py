"""`elasticflow submit`: gives a job to a cluster's scheduler, or writes it in the form that the scheduler takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup
from elasticflow.cli.parameters import FILE_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

COMMANDS: dict[str, CommandEntry] = {
    "slurm": CommandEntry("train.submit_slurm", "Submit a job to Slurm as a batch script.", guide="slurm"),
    "kubernetes": CommandEntry(
        "train.submit_kubernetes", "Apply a job as a manifest of Kubernetes.", guide="kubernetes"
    ),
}


def print_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--print` and `-o FILE`, with which it submits nothing."""
    command = click.option(
        "-o",
        "--output",
        "target",
        metavar="FILE",
        type=FILE_ONLY,
        help="Write what would be submitted to a file, and submit nothing.",
    )(command)
    return click.option(
        "--print",
        "is_printed",
        is_flag=True,
        help="Print what would be submitted, and submit nothing.",
    )(command)


def write_out(text: str, target: Path | None, submit: str) -> None:
    """Print *text*, or write it to *target*; *submit* is the command that submits the file."""
    from elasticflow.cli.output import shell_path, write_file

    if target is None:
        click.echo(text, nl=False)
    else:
        write_file(target, text)
        click.echo(f"wrote {target}: {submit} {shell_path(target)}")


@click.group("submit", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Give a job to a cluster's scheduler, or print what the scheduler takes.

    \b
    elasticflow submit slurm jobs/mnist.toml
    elasticflow submit slurm jobs/mnist.toml --print       the batch script
    elasticflow submit kubernetes jobs/mnist.toml
    elasticflow submit kubernetes jobs/mnist.toml -o mnist.yaml
    """
