"""`elasticflow rendezvous`: a store that outlives what trains."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "serve": CommandEntry("more.rendezvous_serve", "Serve a store in which the machines of runs meet."),
}


@click.group("rendezvous", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Serve a store in which the machines of runs meet, outside of what trains.

    \b
    elasticflow rendezvous serve --port 29400
    """
