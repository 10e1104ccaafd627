"""A group of commands that are imported only when they are used."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click.shell_completion import CompletionItem

_ONE_SECTION: Mapping[str, str] = MappingProxyType({})


class CommandEntry(NamedTuple):
    """A command of a group.

    Attributes:
        module: The command's module below `elasticflow.cli`.
        line: The command's line in `--help` of the group.
        guide: Page of the guide that the command's own `--help` names at the end; empty: none.
    """

    module: str
    line: str
    name: str = "command"
    guide: str = ""


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is called.

    Args:
        table: The commands by name, known without importing anything.
        sections: Titles of a long list, each with the first command under it.
    """

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, CommandEntry],
        sections: Mapping[str, str] = _ONE_SECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._table, self._sections = table, sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module now."""
        if cmd_name not in self._table:
            return None
        entry = self._table[cmd_name]
        module = importlib.import_module(f"elasticflow.cli.{entry.module}")
        command: click.Command = getattr(module, entry.name)
        if entry.guide:
            command.epilog = f"More about it: elasticflow guide {entry.guide}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names; the error about an unknown name suggests one of the table."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            if args[0].endswith(".toml"):  # a job file where the command is left out
                raise click.UsageError(
                    f"{args[0]} comes after a command: {', '.join(self._table)}", ctx=ctx
                ) from error
            raise click.exceptions.NoSuchCommand(args[0], possibilities=list(self._table), ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        titles = {first: title for title, first in self._sections.items()}
        rows: dict[str, list[tuple[str, str]]] = {}
        title = "Commands"
        for name, entry in self._table.items():
            title = titles.get(name, title)
            rows.setdefault(title, []).append((name.ljust(max(map(len, self._table))), entry.line))
        for title, commands in rows.items():
            with formatter.section(title):
                formatter.write_dl(commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return matching command names from the table, without importing them."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=entry.line)
            for name, entry in self._table.items()
            if name.startswith(incomplete)
        ]
        return names or click.Command.shell_complete(self, ctx, incomplete)
