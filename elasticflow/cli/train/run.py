"""`elasticflow run JOB`: compile, then launch exactly what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import case_option, job_of, overrides_option
from elasticflow.cli.train.view import log_format_option, shown, warn

if TYPE_CHECKING:
    from collections.abc import Container

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.launcher.launch import Request
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
    from elasticflow.run_folder import RunFolder


@click.command("run")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@overrides_option
@click.option("--run-id", metavar="ID", help="Make run ID, or go on with it: safe to start again and again.")
@click.option(
    "--accept-drift", is_flag=True, help="With --run-id: go on although the job changed the trajectory."
)
@click.option(
    "--simulate-nodes",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Play N nodes on this machine, each with an agent and workers of its own.",
)
@click.option(
    "--scale",
    metavar="SCHEDULE",
    help='Play nodes that come and go: "1@0s 3@20s 2@40s"; "2!@40s" kills those that go.',
)
@click.option(
    "--join",
    "endpoint",
    metavar="HOST:PORT",
    help="Take part, as one more node, in the run of this job that another machine has started.",
)
@click.option(
    "--node-rank",
    metavar="N",
    type=click.IntRange(0),
    envvar="NODE_RANK",
    help='This machine\'s place among the nodes, from 0, with rdzv_backend = "static"; default: $NODE_RANK.',
)
@case_option
@click.option("--all", "is_all", is_flag=True, help="Every case of the file's [matrix], one after the other.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@log_format_option
def command(
    job_file: Path,
    overrides: tuple[str, ...],
    run_id: str | None,
    accept_drift: bool,
    simulate_nodes: int | None,
    scale: str | None,
    endpoint: str | None,
    node_rank: int | None,
    case: str | None,
    is_all: bool,
    dry_run: bool,
    log_format: str,
) -> int:
    """Train a job. Ctrl-C or SIGTERM: snapshot, leave, exit 75; a second one: leave at once, exit 130.

    With --all, a case that fails does not stop the others, and the exit code is 1 in the end; a signal stops all. With
    the same --run-id the same command goes on: cases that are finished are not trained again. The run of a case is
    called after the run id and the case.

    \b
    elasticflow run jobs/mnist.toml
    elasticflow run jobs/mnist.toml --set train.epochs=3
    elasticflow run jobs/mnist.toml --run-id nightly   makes it, or goes on with it
    elasticflow run jobs/mnist.toml --join head:29400   one more node of the run that `head` started
    elasticflow run jobs/mnist.toml --set nodes.max=3 --scale "1@0s 3@20s 2@40s"
    elasticflow run jobs/sweep.toml --case lr0.001-seed1   one case of a file with [matrix]
    elasticflow run jobs/sweep.toml --all --run-id tuning
    """
    from elasticflow.errors import FINISHED

    _require_usable(simulate_nodes, scale, run_id)
    if is_all and (case is not None or endpoint is not None):
        raise click.UsageError(
            "--all is every case, on machines that this one leads: give it without --case and --join"
        )
    if dry_run:
        from elasticflow.cli.train.dry_run import show_plan

        show_plan(
            job_file,
            overrides,
            case=case,
            run_id=run_id,
            simulate_nodes=simulate_nodes,
            scale=scale,
            endpoint=endpoint,
            is_all=is_all,
        )
        return FINISHED
    from elasticflow.jobfile.diagnostics import codes
    from elasticflow.launcher.supervisor.scale_schedule import parse_scale

    is_simulated = simulate_nodes is not None or scale is not None
    but = {codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS} if is_simulated else set()
    changes = parse_scale(scale or f"{simulate_nodes or 1}@0s")
    train = _Training(overrides, accept_drift, changes, node_rank, log_format)
    if is_all:
        from elasticflow.cli.train.run_all import run_all

        return run_all(job_file, overrides, run_id, but, train, is_quiet=log_format == "json")
    loaded = job_of(job_file, overrides, case)
    if endpoint is None:
        return _one(loaded, run_id, but, train)
    if run_id or is_simulated or accept_drift:
        raise click.UsageError("--join takes part in a run as its head started it: give it alone")
    return _join(loaded, endpoint, train)


@dataclass(frozen=True)
class _Training:
    """How jobs are trained, whichever they are."""

    overrides: tuple[str, ...]
    accept_drift: bool
    scale: tuple[ScaleChange, ...]
    node_rank: int | None
    log_format: str

    def __call__(self, loaded: LoadedJob, folder: RunFolder) -> int:
        return self.launch(self.request(loaded, folder))

    def request(self, loaded: LoadedJob, folder: RunFolder) -> Request:
        """Return what is to be launched.

        Raises:
            JobRefusedError: a package that the job's modules import is not installed here.
        """
        from elasticflow.compiler.inputs.missing_imports import require_importable
        from elasticflow.launcher.launch import Request

        assert loaded.job is not None
        require_importable(loaded)
        facts = (loaded.job, loaded.files, self.overrides, loaded.project_root, folder)
        return Request(*facts, self.accept_drift, self.scale, self.node_rank, loaded.case)

    def launch(self, request: Request) -> int:
        """Launch it, shown as was asked for, and return the exit code."""
        from elasticflow.launcher.launch import launch

        with shown(self.log_format, request.folder.path) as show:
            return launch(request, show, warn)


def _require_usable(simulate_nodes: int | None, scale: str | None, run_id: str | None) -> None:
    from elasticflow.run_folder import RUN_ID

    if simulate_nodes is not None and scale is not None:
        raise click.UsageError("--simulate-nodes and --scale both say how many nodes there are: use one")
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise click.BadParameter("letters, digits, '.', '_' and '-' only, at most 100", param_hint="--run-id")


def _one(loaded: LoadedJob, run_id: str | None, but: Container[str], train: _Training) -> int:
    """Make the run of one job, or go on with it, if it is not finished."""
    from elasticflow.cli.terminal import show_warnings
    from elasticflow.cli.train.run_ids import run_id_of
    from elasticflow.errors import FINISHED
    from elasticflow.observe.runs import is_finished
    from elasticflow.run_folder import RunFolder

    assert loaded.job is not None
    folder = RunFolder.of(loaded.project_root, loaded.job.job.name, run_id_of(run_id, loaded.case))
    if is_finished(folder):
        click.echo(f"run {folder.run_id} is finished")
        return FINISHED
    show_warnings(loaded, but=but)
    return train(loaded, folder)


def _join(loaded: LoadedJob, endpoint: str, train: _Training) -> int:
    """Take part in the run that another machine leads at *endpoint*."""
    from elasticflow.launcher.join import Address, join
    from elasticflow.run_folder import RunFolder

    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter("write it like head:29400", param_hint="--join")
    assert loaded.job is not None
    folder = RunFolder.of(loaded.project_root, loaded.job.job.name, "joined")
    address = Address(host, int(port))
    return join(
        train.request(loaded, folder), address, lambda text: click.echo(text, err=True), warn, train.launch
    )
