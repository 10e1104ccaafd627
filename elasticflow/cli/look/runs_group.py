"""`elasticflow runs`: lists the project's runs, removes runs, sends what their sinks have missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_DEFAULT = "list"
COMMANDS: dict[str, CommandEntry] = {
    _DEFAULT: CommandEntry("look.runs_list", "List runs; this is what `runs` does by itself."),
    "rm": CommandEntry("look.runs_remove", "Remove runs, with their snapshots.", "rm"),
    "prune": CommandEntry("look.runs_remove", "Remove old runs, by rules.", "prune"),
    "send": CommandEntry("look.runs_send", "Send what a run's sinks have missed.", guide="sinks"),
}


class RunsGroup(LazyGroup):
    """A group that lists runs if no command is named: `runs`, `runs mnist`, `runs --format json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the first word as a command if it is one, else all words as arguments of the list."""
        is_help = bool(args) and args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_help else _with_command(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names, else the list."""
        return super().resolve_command(ctx, _with_command(args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that match, then the jobs."""
        from elasticflow.cli.parameters import JOB_NAME

        names = super().shell_complete(ctx, incomplete)
        found = {item.value for item in names}
        jobs = JOB_NAME.shell_complete(ctx, click.Option(["--job"]), incomplete)
        return names + [item for item in jobs if item.value not in found]


def _with_command(args: list[str]) -> list[str]:
    return args if args and args[0] in COMMANDS else [_DEFAULT, *args]


@click.group("runs", cls=RunsGroup, table=COMMANDS, subcommand_metavar="[JOB] | COMMAND [ARGS]...")
def command() -> None:
    """List the project's runs, or those of one JOB; remove runs; send what their sinks have missed.

    \b
    elasticflow runs                                    all of them, the newest first
    elasticflow runs mnist --format json
    elasticflow runs rm 20261120-104500-4f2a
    elasticflow runs prune --older-than "30 d" --status failed --dry-run
    elasticflow runs send mnist
    """
