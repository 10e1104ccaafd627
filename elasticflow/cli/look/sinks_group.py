"""`elasticflow sinks`: outputs of a run beside its folder."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "send": CommandEntry("look.sinks_send", "Send what a run's sinks have not got."),
    "test": CommandEntry("look.sinks_test", "Send a test message to those whom [notify] names."),
}


@click.group("sinks", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Send a run's metrics and events to sinks beside its folder (logging.sinks), and test its messages ([notify]).

    \b
    elasticflow sinks send mnist            all that has not been sent yet
    elasticflow sinks test jobs/mnist.toml  a test message
    """
