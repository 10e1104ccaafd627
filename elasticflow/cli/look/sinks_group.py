"""`elasticflow sinks`: what goes elsewhere than into a run's folder."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "send": CommandEntry("look.sinks_send", "Send what a run's sinks have not got."),
    "test": CommandEntry("look.sinks_test", "Send a test message to those whom [notify] names."),
}


@click.group("sinks", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Look after where a run's metrics and events go besides its folder (logging.sinks), and who is told ([notify]).

    \b
    elasticflow sinks send mnist            what did not get through
    elasticflow sinks test jobs/mnist.toml  a message, to see whether it arrives
    """
