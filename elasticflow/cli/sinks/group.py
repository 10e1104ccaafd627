"""`elasticflow sinks`: what has not got to where a run's metrics go besides its folder."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "send": CommandEntry("sinks.send", "Send what a run's sinks have not got."),
}


@click.group("sinks", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Look after where a run's metrics and events go besides its folder (logging.sinks).

    \b
    elasticflow sinks send mnist     what did not get through while it trained
    """
