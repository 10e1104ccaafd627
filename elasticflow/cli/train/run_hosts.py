"""`elasticflow run JOB --hosts FILE`: a node on each host of a file, started by ssh."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import show_warnings
from elasticflow.cli.train.run_options import run_id_of
from elasticflow.errors import INTERRUPTED, HostsError

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.train.run_options import RunOptions
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.launcher.machines.run_on_hosts import Host

_PORT = 29400


def run_hosts(options: RunOptions, path: Path) -> int:
    """Run the job on the hosts of the file at *path*; return the exit code.

    Raises:
        HostsError: the file is invalid, a host does not resolve, or there are more hosts than the job may have.
        TokenError: the run's token cannot be read.
    """
    from elasticflow.launcher.machines.remote import Order
    from elasticflow.launcher.machines.run_on_hosts import read_hosts, run_on_hosts
    from elasticflow.launcher.rendezvous.token import given_token, new_token
    from elasticflow.protocol.handshake import TOKEN
    from elasticflow.protocol.run_files import RESUME_COMMAND
    from elasticflow.system.units import parse_duration

    hosts = read_hosts(path)
    on_hosts, loaded, job = options.with_endpoint(lambda: f"{hosts[0].name}:{_PORT}")
    endpoint = job.nodes.endpoint
    assert endpoint is not None
    show_warnings(loaded)
    if len(hosts) > job.nodes.max:
        raise HostsError(
            f"{path} has {len(hosts)} hosts, and nodes.max is {job.nodes.max}",
            f"--set nodes.max={len(hosts)}, or take hosts out",
        )
    run_id = run_id_of(options.run_id, loaded.case)
    options.say(f"run {run_id} on {', '.join(host.target for host in hosts)}, which meet at {endpoint}")
    grace_s = parse_duration(job.snapshots.grace)
    # Each host gets the token by ssh, and nothing else needs it.
    token = given_token(job.nodes.token_file, loaded.project_root) or new_token()
    again = options.command_with(run_id)
    launch = secrets.token_hex(8)
    orders = [
        (
            host,
            Order(
                folder=host.folder or str(loaded.project_root.resolve()),
                words=_words(on_hosts, loaded, run_id, endpoint, rank),
                environment={TOKEN: token, RESUME_COMMAND: again},
                run=f"{job.job.name}/{run_id}",
                grace_s=grace_s,
                host=host.target,
                launch=launch,
            ),
        )
        for rank, host in enumerate(hosts)
    ]
    width = max(len(host.target) for host in hosts)
    code = run_on_hosts(
        orders,
        lambda host, line: _show(host, line, width, options.log_format),
        lambda text: click.echo(text, err=True),
        first_decides=not job.torchrun.is_store_outside,
    )
    if code == INTERRUPTED:
        click.echo(f"continue with: {again}", err=True)
    return code


def _words(options: RunOptions, loaded: LoadedJob, run_id: str, endpoint: str, rank: int) -> tuple[str, ...]:
    """Return the command of the host with *rank*: the same on all hosts, except for the rank if it decides who leads."""
    words = [*options.node_command(loaded, endpoint), "--run-id", run_id]
    words += ["--accept-drift"] if options.accept_drift else []
    return (*words, *(() if loaded.job.torchrun.is_store_outside else ("--node-rank", str(rank))))


def _show(host: Host, line: str, width: int, log_format: str) -> None:
    # Records are for programs: each line is printed unchanged.
    click.echo(line if log_format == "json" else f"{host.target:<{width}} | {line}")
