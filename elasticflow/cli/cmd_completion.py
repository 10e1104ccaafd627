"""`elasticflow completion SHELL`: the script that makes a shell complete commands and files (floor 5)."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  elasticflow completion bash >> ~/.bashrc
    zsh:   elasticflow completion zsh >> ~/.zshrc
    fish:  elasticflow completion fish > ~/.config/fish/completions/elasticflow.fish
    """
    of_shell = get_completion_class(shell)
    assert of_shell is not None  # the three are click's own
    click.echo(of_shell(ctx.find_root().command, {}, "elasticflow", "_ELASTICFLOW_COMPLETE").source())
