"""`elasticflow run JOB`: compile, then launch exactly the files that were written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from elasticflow.cli.output import show_warnings, warn
from elasticflow.cli.parameters import FILE_ONLY, JOB_FILE, RUN_ID, case_option, job_of, overrides_option
from elasticflow.cli.train.run_options import RunOptions, check_place
from elasticflow.cli.train.view import launch_shown, log_format_option
from elasticflow.errors import FINISHED

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.run_folder import RunFolder


@click.command("run")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@overrides_option
@click.option(
    "--run-id",
    type=RUN_ID,
    metavar="ID",
    help="Start run ID, or continue it: safe to repeat.",
)
@click.option(
    "--accept-drift", is_flag=True, help="With --run-id: continue although the job changed the trajectory."
)
@click.option(
    "--simulate-nodes",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Simulate N nodes on this machine, each with its own agent and workers.",
)
@click.option(
    "--scale",
    metavar="SCHEDULE",
    help='Simulate nodes that come and go: "1@0s 3@20s 2@40s"; "2!@40s" kills the nodes that go.',
)
@click.option(
    "--join",
    "endpoint",
    metavar="HOST:PORT",
    help="Take part in the run of this job that is led there; with --run-id: lead it if no machine does.",
)
@click.option(
    "--hosts",
    type=FILE_ONLY,
    metavar="FILE",
    help="Run a node on each host that FILE names, started by ssh; the first one leads.",
)
@click.option(
    "--on",
    type=click.Choice(["ray"]),
    help="Run the nodes on a cluster's scheduler: Ray, at $RAY_ADDRESS or on this machine; this machine leads.",
)
@click.option(
    "--node-rank",
    metavar="N",
    type=click.IntRange(0),
    envvar="NODE_RANK",
    help='This machine\'s rank among the nodes, from 0. With --run-id and --join, 0 leads; rdzv_backend = "static" needs it. '
    "Default: $NODE_RANK.",
)
@case_option
@click.option("--all", "is_all", is_flag=True, help="Every case of the file's [matrix], one after the other.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@log_format_option
def command(*, dry_run: bool, **options: Any) -> int:
    """Train a job. Ctrl-C or SIGTERM: take a snapshot, exit 75; a second one: exit at once, 130.

    With --all, a case that fails does not stop the others, but makes the exit code 1; a signal stops all. With the same
    --run-id the same command continues: finished cases are not trained again. The run of a case is named after the run
    id and the case.

    \b
    elasticflow run jobs/mnist.toml
    elasticflow run jobs/mnist.toml --set train.epochs=3
    elasticflow run jobs/mnist.toml --run-id nightly   makes it, or continues with it
    elasticflow run jobs/mnist.toml --join head:29400   one more node of the run led there
    elasticflow run jobs/mnist.toml --run-id nightly --join head:29400   the same on all machines
    elasticflow run jobs/mnist.toml --hosts hosts.txt   by ssh on each
    elasticflow run jobs/mnist.toml --on ray   nodes.max nodes on a Ray cluster
    elasticflow run jobs/mnist.toml --set nodes.max=3 --scale "1@0s 3@20s 2@40s"
    elasticflow run jobs/sweep.toml --case lr0.001-seed1   one case of a file with [matrix]
    elasticflow run jobs/sweep.toml --all --run-id tuning
    """
    leads_alone = options["hosts"] is not None or options["on"] is not None or options["is_all"]
    if leads_alone and not _is_rank_given():
        options["node_rank"] = None
    return _run(RunOptions(**options), dry_run=dry_run)


def _is_rank_given() -> bool:
    """Return whether the command line has the rank: many programs set $NODE_RANK."""
    source = click.get_current_context().get_parameter_source("node_rank")
    return source is ParameterSource.COMMANDLINE


def _run(options: RunOptions, *, dry_run: bool) -> int:
    options.check()
    if dry_run:
        _show_plan(options)
        return FINISHED
    # An invalid --scale is refused before the job is read.
    options.scale_changes()
    if options.hosts is not None:
        from elasticflow.cli.train.run_on_machines import run_hosts

        return run_hosts(options, options.hosts)
    if options.on == "ray":
        from elasticflow.cli.train.run_on_machines import run_ray

        return run_ray(options, lambda request: launch_shown(request, options.log_format))
    if options.is_all:
        from elasticflow.cli.train.run_all import run_all

        return run_all(options, lambda job, run: launch_shown(options.request(job, run), options.log_format))
    loaded = job_of(options.job_file, options.overrides, options.case)
    if options.endpoint is not None:
        return _join(loaded, options.endpoint, options)
    _check_rank(loaded, options.node_rank)
    check_place(loaded)
    folder = options.folder_of(loaded)
    if options.has_finished(folder):
        return FINISHED
    show_warnings(loaded, but=options.pointless_warnings)
    return launch_shown(options.request(loaded, folder), options.log_format)


def _check_rank(loaded: LoadedJob, rank: int | None) -> None:
    """Refuse a rank other than 0 without --join: this machine would lead a run of its own. A static rendezvous needs ranks."""
    if rank and _is_rank_given() and loaded.job.torchrun.rdzv_backend != "static":
        raise click.UsageError(
            f"--node-rank {rank} is for a machine that joins a run, and nothing says which: "
            f"add --join {loaded.job.nodes.endpoint or 'HOST:PORT'}, or leave it out"
        )


def _join(loaded: LoadedJob, endpoint: str, options: RunOptions) -> int:
    """Take part in the run that another machine leads at *endpoint*; with a run id, lead it if no machine does."""
    import os
    from functools import partial

    from elasticflow.clusters.slurm.commands import why_leader_is_lost
    from elasticflow.launcher.join import join
    from elasticflow.launcher.lead_or_join import lead_or_join
    from elasticflow.protocol.store_address import StoreAddress, split
    from elasticflow.run_folder import RunFolder

    if options.is_simulated:
        raise click.UsageError("--join takes part in a run as it was started elsewhere: give it alone")
    try:
        host, port = split(endpoint)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--join") from error
    if not 0 < port < 65536:
        raise click.BadParameter("ports are numbers from 1 to 65535", param_hint="--join")
    if options.run_id is None:
        take_part: Callable[..., int] = join
        folder = RunFolder.of(loaded.project_root, loaded.job.job.name, "joined")
    else:
        take_part = partial(lead_or_join, why_leader_is_lost=partial(why_leader_is_lost, os.environ))
        folder = options.folder_of(loaded)
        if options.has_finished(folder):
            return FINISHED
    return take_part(
        options.request(loaded, folder),
        StoreAddress(host, port),
        lambda text: click.echo(text, err=True),
        warn,
        lambda request: launch_shown(request, options.log_format),
    )


def _show_plan(options: RunOptions) -> None:
    """Print the plan that `run` would follow.

    Raises:
        JobRefusedError: the job has errors.
        ScaleError: the options simulate more nodes than the job may have.
    """
    from elasticflow.cli.write.plan import newest_run, show, show_cases

    if options.endpoint is not None:
        raise click.UsageError(
            "--join takes part in a run as it was started elsewhere: there is nothing to plan here; "
            "`elasticflow plan` shows what the machine that starts it would do"
        )
    if options.is_all:
        show_cases(options.job_file, options.overrides)
        return
    loaded = job_of(options.job_file, options.overrides, options.case)
    asides: dict[str, str] = {}
    show_warnings(loaded, but=options.pointless_warnings)
    if options.is_simulated:
        changes = options.scale_changes(loaded.job.nodes)
        schedule = ", then ".join(
            f"{change.nodes} from {change.at_s:g} s on{' (others are killed)' if change.by_force else ''}"
            for change in changes
        )
        asides["played"] = (
            f"nodes on this machine: {options.simulate_nodes if options.scale is None else schedule}"
        )
    against = newest_run(loaded)
    if options.run_id is not None:
        run = options.folder_of(loaded)
        asides["run"] = _what_becomes_of(run)
        against = run if run.launch_numbers() else against
    show(loaded, against, asides=asides)


def _what_becomes_of(run: RunFolder) -> str:
    from elasticflow.observe.runs import is_finished

    launches = run.launch_numbers()
    if not launches:
        return f"{run.run_id} is not here: it is made, or resumed if its snapshots are found"
    if is_finished(run):
        return f"{run.run_id} is finished: nothing would be done"
    return f"{run.run_id} is resumed, by launch {launches[-1] + 1}"
