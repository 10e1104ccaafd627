"""Commands and their options are a promise: this literal changes on purpose or not at all."""

from __future__ import annotations

import click

from elasticflow.cli.main import COMMANDS, group

PROMISED = {
    "validate": {"FILE...", "--set", "--strict", "--output-format"},
    "plan": {"JOB", "--set", "--format"},
    "compile": {"JOB", "-o", "--set", "--force"},
    "run": {"JOB", "--set", "--run-id", "--accept-drift", "--dry-run", "--log-format"},
    "resume": {"[RUN]", "--set", "--accept-drift", "--log-format"},
    "runs": {"[JOB]", "--format"},
    "status": {"[RUN]", "--format"},
    "logs": {"[RUN]", "--rank", "--generation", "--follow", "--level", "--format"},
    "schema": {"--output"},
    "explain": {"[CODE]"},
    "completion": {"{bash|zsh|fish}"},
}


def _offered(name: str) -> set[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    found = set()
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found.add(parameter.make_metavar(click.Context(command)))
        else:
            found.add(max(parameter.opts, key=len))
    return found


def test_commands_and_options_are_those_promised() -> None:
    """Every command of the group, each with exactly these arguments and options."""
    assert PROMISED == {name: _offered(name) for name in COMMANDS}


def test_every_option_of_every_command_is_explained() -> None:
    """`--help` says something about each option."""
    silent = [
        (name, parameter.name)
        for name in COMMANDS
        for parameter in getattr(group.get_command(click.Context(group), name), "params", [])
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert [] == silent
