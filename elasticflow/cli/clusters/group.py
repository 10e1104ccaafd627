"""`elasticflow render`: a job as what a cluster's scheduler takes."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "kubernetes": CommandEntry(
        "clusters.kubernetes", "Write a job as a manifest for kubectl.", guide="kubernetes"
    ),
}


@click.group("render", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Write a job as what a cluster's scheduler takes.

    \b
    elasticflow render kubernetes jobs/mnist.toml -o mnist.yaml
    """
