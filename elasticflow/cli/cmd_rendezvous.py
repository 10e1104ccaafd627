"""`elasticflow rendezvous`: a store that outlives what trains (floor 5)."""

from __future__ import annotations

import click

from elasticflow.cli.lazy import LazyGroup

COMMANDS: dict[str, str] = {
    "serve": "Serve a store in which the machines of runs meet.",
}


@click.group("rendezvous", cls=LazyGroup, table=COMMANDS, rooms="elasticflow.cli.cmd_rendezvous_")
def command() -> None:
    """Serve a store in which the machines of runs meet, outside of what trains.

    \b
    elasticflow rendezvous serve --port 29400
    """
