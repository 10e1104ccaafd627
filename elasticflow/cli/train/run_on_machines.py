"""`elasticflow run JOB` on other machines: `--hosts FILE`, on each host by ssh; `--on ray`, led from here on Ray's nodes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import show_warnings, warn
from elasticflow.cli.parameters import job_of
from elasticflow.cli.train.run_options import check_place, run_id_of
from elasticflow.errors import INTERRUPTED, HostsError, RayError
from elasticflow.jobfile.tables.ray import RayTable
from elasticflow.launcher.machines.cluster import connect, demand_of
from elasticflow.launcher.machines.ray_nodes import RayNodes
from elasticflow.launcher.machines.remote import Order
from elasticflow.launcher.machines.run_on_hosts import read_hosts, run_on_hosts
from elasticflow.launcher.rendezvous.token import given_token, new_token
from elasticflow.launcher.supervisor.scale_schedule import ELSEWHERE
from elasticflow.protocol.handshake import TOKEN
from elasticflow.protocol.run_files import RESUME_COMMAND
from elasticflow.run_folder import new_run_id
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.cli.train.run_options import RunOptions
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.machines.cluster import Demand
    from elasticflow.launcher.machines.run_on_hosts import Host
    from elasticflow.launcher.supervisor.launch_record import Request

_PORT = 29400


def run_hosts(options: RunOptions, path: Path) -> int:
    """Run the job on the hosts of the file at *path*; return the exit code.

    Raises:
        HostsError: the file is invalid, a host does not resolve, or there are more hosts than the job may have.
        TokenError: the run's token cannot be read.
    """
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


def run_ray(options: RunOptions, launch: Callable[[Request], int]) -> int:
    """Run the job with nodes.max nodes on Ray; return the exit code.

    Raises:
        RayError: ray is not installed, there is no cluster, or the job has its store elsewhere.
        TokenError: the run's token cannot be read.
    """
    check_place(job_of(options.job_file, options.overrides, options.case))
    ray = connect()
    options = replace(options, run_id=options.run_id or new_run_id())
    os.environ[RESUME_COMMAND] = again = options.command_with(options.run_id or "")
    options, loaded, job = options.with_endpoint(lambda: _own_endpoint(ray.util.get_node_ip_address()))
    if job.torchrun.is_store_outside:
        raise RayError(
            "with --on ray this machine leads, and the job says that the store is elsewhere",
            "take rdzv_endpoint, rdzv_backend and is_host out of [torchrun]",
        )
    folder = options.folder_of(loaded)
    if options.has_finished(folder):
        return 0
    show_warnings(loaded)
    nodes = ray.nodes()
    table = job.ray or RayTable()
    demand = demand_of(job.nodes.nproc_per_node, nodes)
    demand = replace(demand, resources=table.resources, labels=table.labels)
    _tell_of_room(options, job, demand, [node["Resources"] for node in nodes if node["Alive"]])
    # Each node gets the token through Ray's own connections, and nothing else needs it.
    os.environ[TOKEN] = given_token(job.nodes.token_file, loaded.project_root) or new_token()
    endpoint = job.nodes.endpoint
    assert endpoint is not None
    order = Order(
        folder=str(loaded.project_root.resolve()),
        words=tuple(options.node_command(loaded, endpoint)),
        environment={TOKEN: os.environ[TOKEN]},
        run=f"{job.job.name}/{folder.run_id}",
        grace_s=parse_duration(job.snapshots.grace),
    )
    on_ray = RayNodes(
        ray,
        job.nodes.max,
        demand,
        order,
        lambda host, line: click.echo(f"{host} | {line}", err=True),
        lambda text: click.echo(text, err=True),
        # As on SIGTERM.
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        table.placement,
    )
    on_ray.start()
    try:
        code = launch(replace(options.request(loaded, folder), scale=ELSEWHERE))
    finally:
        on_ray.close()
    if on_ray.refusal is not None:
        raise RayError(
            f"no node could be begun on Ray: {on_ray.refusal}",
            "what is installed here has to be on all nodes of Ray, elasticflow[ray] too, and the project in the same folder, or brought "
            "along by `ray job submit --working-dir .`",
        )
    if code == INTERRUPTED:
        click.echo(f"continue with: {again}", err=True)
    return code


def _own_endpoint(address: str) -> str:
    with socket.create_server(("", 0)) as probe:
        return f"{address}:{probe.getsockname()[1]}"


def _tell_of_room(options: RunOptions, job: Job, demand: Demand, resources: list[dict[str, float]]) -> None:
    room = sum(demand.fits(each) for each in resources)
    options.say(
        f"run {options.run_id} on Ray: {job.nodes.min} to {job.nodes.max} nodes of {demand} each, which meet at {job.nodes.endpoint}; "
        f"{room} of Ray's {len(resources)} nodes are large enough"
    )
    if room == 0:
        warn(f"no node of Ray has {demand}: the run waits until one comes, as an autoscaler may bring it")
