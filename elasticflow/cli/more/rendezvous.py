"""`elasticflow rendezvous serve`: a store that outlives what trains."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "serve": CommandEntry("more.rendezvous", "Serve a store in which the machines of runs meet.", "serve"),
}


@click.group("rendezvous", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Serve a store in which the machines of runs meet, outside of what trains.

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
    help="File with the token that machines have to know; $ELASTICFLOW_TOKEN goes before it.",
)
@click.option(
    "--state",
    metavar="DIR",
    help="Folder in which the store is kept: killed and started again with it, it continues, and the runs with it.",
)
def serve(host: str, port: int, token_file: str | None, state: str | None) -> int:
    """Serve a store in which the machines of runs meet, until Ctrl-C or SIGTERM.

    It trains nothing and may run on any machine, such as a login node. Jobs name it and say that it is there:

    \b
    [nodes]
    endpoint = "store:29400"
    [torchrun]
    rdzv_conf = { is_host = false }

    \b
    on `store`:        elasticflow rendezvous serve --port 29400
    on one machine:    elasticflow run JOB
    on any other one:  elasticflow run JOB --join store:29400

    Any of the machines that train may be lost then, also the one that began: a machine that has joined leads the run
    on, from its newest snapshot. With --state the store may be lost as well: runs train on, and wait for it for a minute.
    Else, or after that, they end with 75, and `elasticflow resume` continues with them at the same endpoint once a store
    is served there again. Several runs may use one store, one of each job at a time.
    With a token, no one speaks to it who does not have the same one: see `elasticflow guide machines`. Without one it
    serves all who reach its port.
    """
    from pathlib import Path

    from elasticflow.launcher.rendezvous.serve_command import serve_until_asked
    from elasticflow.launcher.rendezvous.token import given_token

    token = given_token(token_file, Path.cwd())
    folder = None if state is None else Path(state)
    return serve_until_asked(host, port, token, lambda text: click.echo(text, err=True), folder)
