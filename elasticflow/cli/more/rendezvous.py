"""`elasticflow rendezvous serve`: a rendezvous store outside the training processes."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "serve": CommandEntry("more.rendezvous", "Serve a store in which the machines of runs meet.", "serve"),
}


@click.group("rendezvous", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Serve a rendezvous store for the machines of runs, outside the training processes.

    \b
    elasticflow rendezvous serve --port 29400
    """


@click.command("serve")
@click.option("--host", default="", help="Address to listen on; default: all of this machine's.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=29400,
    show_default=True,
    help="Port to listen on; 0: a free one.",
)
@click.option(
    "--token-file",
    metavar="PATH",
    help="File with the token that machines must have; $ELASTICFLOW_TOKEN wins over it.",
)
@click.option(
    "--state",
    metavar="DIR",
    help="Folder for the store's content: after a kill, a new store with this folder continues, and so do the runs.",
)
def serve(host: str, port: int, token_file: str | None, state: str | None) -> int:
    """Serve a rendezvous store for the machines of runs, until Ctrl-C or SIGTERM.

    The store trains nothing and may run on any machine, such as a login node. Jobs name it:

    \b
    [nodes]
    endpoint = "store:29400"
    [torchrun]
    rdzv_conf = { is_host = false }

    \b
    on `store`:        elasticflow rendezvous serve --port 29400
    on one machine:    elasticflow run JOB
    on any other one:  elasticflow run JOB --join store:29400

    The run then survives the loss of any machine that trains, including the first: a machine that has joined leads the
    run from its newest snapshot. With --state, runs also survive the loss of the store: they continue to train, and wait
    a minute for it. Otherwise, or after that minute, they exit with 75, and `elasticflow resume` continues them once a
    store is served at the same endpoint again. Several runs may use one store, but only one run of each job at a time.
    With a token, only processes that have the same token can use the store: see `elasticflow guide machines`. Without
    one, the store serves everyone who reaches its port.
    """
    from pathlib import Path

    from elasticflow.launcher.rendezvous.serve_command import serve_until_asked
    from elasticflow.launcher.rendezvous.token import given_token

    token = given_token(token_file, Path.cwd())
    folder = None if state is None else Path(state)
    return serve_until_asked(host, port, token, lambda text: click.echo(text, err=True), folder)
