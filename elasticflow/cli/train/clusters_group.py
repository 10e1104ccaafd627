"""`elasticflow render` and `elasticflow submit`: a job in the form that a cluster's scheduler takes."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "slurm": CommandEntry("train.slurm", "Write a job as a batch script for sbatch.", guide="slurm"),
    "kubernetes": CommandEntry(
        "train.kubernetes", "Write a job as a manifest for kubectl.", guide="kubernetes"
    ),
}
SUBMIT_COMMANDS: dict[str, CommandEntry] = {
    "slurm": CommandEntry("train.submit_slurm", "Submit a job to Slurm.", guide="slurm"),
}


@click.group("render", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Write a job in the form that a cluster's scheduler takes.

    \b
    elasticflow render slurm jobs/mnist.toml -o mnist.sbatch
    elasticflow render kubernetes jobs/mnist.toml -o mnist.yaml
    """


@click.group("submit", cls=LazyGroup, table=SUBMIT_COMMANDS)
def submit() -> None:
    """Give a job to a cluster's scheduler.

    \b
    elasticflow submit slurm jobs/mnist.toml
    """
