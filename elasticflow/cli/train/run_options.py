"""The options of `elasticflow run`, and their effects on a job."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import run_word, warn
from elasticflow.cli.parameters import job_of
from elasticflow.errors import CaseError, RayError
from elasticflow.run_folder import RUN_ID, RunFolder, new_run_id, path_from_root
from elasticflow.system.redaction import public_overrides

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.launching import NodesTable
    from elasticflow.launcher.supervisor.launch_record import Request
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange

_RAY_PACKAGE = "_ray_pkg_"  # begins the name of a folder into which Ray unpacks a package (seen in 2.60)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line; see `elasticflow run --help`."""

    job_file: Path
    overrides: tuple[str, ...] = ()
    run_id: str | None = None
    accept_drift: bool = False
    simulate_nodes: int | None = None
    scale: str | None = None
    endpoint: str | None = None
    node_rank: int | None = None
    case: str | None = None
    is_all: bool = False
    log_format: str = "console"
    hosts: Path | None = None
    on: str | None = None

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            UsageError: two options contradict each other.
        """
        if self.simulate_nodes is not None and self.scale is not None:
            raise click.UsageError("--simulate-nodes and --scale both say how many nodes there are: use one")
        if self.accept_drift and self.run_id is None:
            raise click.UsageError(
                "--accept-drift continues a run although its job changed: name the run with --run-id"
            )
        names_nodes = (
            self.endpoint is not None or self.is_simulated or self.is_all or self.node_rank is not None
        )
        if self.hosts is not None and names_nodes:
            raise click.UsageError(
                "--hosts says which machines there are, and how they meet: give it without --join, --node-rank, --all, "
                "--simulate-nodes and --scale"
            )
        if self.on is not None and (self.hosts is not None or names_nodes):
            raise click.UsageError(
                f"--on {self.on} says where the nodes are: give it without --hosts, --join, --node-rank, --all, "
                "--simulate-nodes and --scale"
            )
        if self.is_all and (self.case is not None or self.endpoint is not None or self.node_rank):
            raise click.UsageError(
                "--all is every case, on machines that this one leads: give it without --case, --join and --node-rank"
            )

    def with_endpoint(self, endpoint: Callable[[], str]) -> tuple[RunOptions, LoadedJob, Job]:
        """Return the options and the job; a job that names no endpoint gets *endpoint*, as by `--set`.

        Raises:
            JobRefusedError: the job has errors.
        """
        options, loaded = self, job_of(self.job_file, self.overrides, self.case)
        if loaded.job.nodes.endpoint is None:
            options = replace(self, overrides=(*self.overrides, f"nodes.endpoint={endpoint()}"))
            loaded = job_of(options.job_file, options.overrides, options.case)
        return options, loaded, loaded.job

    def node_command(self, loaded: LoadedJob, endpoint: str) -> list[str]:
        """Return the words by which another machine takes part in the run that is led at *endpoint*."""
        job_file = loaded.path.resolve().relative_to(loaded.project_root.resolve())
        words = ["run", job_file.as_posix(), "--join", endpoint, "--log-format", self.log_format]
        words += [word for text in self.overrides for word in ("--set", text)]
        return words + ([] if self.case is None else ["--case", self.case])

    @property
    def is_simulated(self) -> bool:
        """True if several nodes are simulated on this machine."""
        return self.simulate_nodes is not None or self.scale is not None

    @property
    def pointless_warnings(self) -> frozenset[str]:
        """Codes of warnings about a job that are pointless if all nodes are simulated on this machine."""
        from elasticflow.jobfile.diagnostics import codes

        return frozenset({codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS}) if self.is_simulated else frozenset()

    def say(self, sentence: str) -> None:
        """Print a sentence for people: on standard error if standard output has records."""
        click.echo(sentence, err=self.log_format == "json")

    def has_finished(self, folder: RunFolder) -> bool:
        """Return whether the run has finished, and if so, print that."""
        from elasticflow.observe.runs import is_finished, way_to_train_on

        if not is_finished(folder):
            return False
        new = "another --run-id begins a new run"
        self.say(
            f"run {folder.run_id} is finished: nothing was trained; {new}{way_to_train_on(folder, run_word(folder))}"
        )
        return True

    def scale_changes(self, nodes: NodesTable | None = None) -> tuple[ScaleChange, ...]:
        """Return the numbers of simulated nodes, with the times of the changes.

        Raises:
            ScaleError: --scale cannot be read, or is of more nodes than the job, if its *nodes* are given, may have.
        """
        from elasticflow.launcher.supervisor.scale_schedule import check_scale, parse_scale

        changes = parse_scale(self.scale or f"{self.simulate_nodes or 1}@0s")
        if nodes is not None:
            check_scale(changes, nodes)
        return changes

    def folder_of(self, loaded: LoadedJob) -> RunFolder:
        """Return the run folder of a job; it need not exist.

        Raises:
            CaseError: the run's id is too long.
        """
        return RunFolder.of(loaded.project_root, loaded.job.job.name, run_id_of(self.run_id, loaded.case))

    def command_with(self, run_id: str) -> str:
        """Return the command line that continues the run on the same machines, without secrets: the run records it."""
        words = ["elasticflow", "run", str(self.job_file)]
        words += [] if self.hosts is None else ["--hosts", str(self.hosts)]
        words += [] if self.on is None else ["--on", self.on]
        words += [] if self.case is None else ["--case", self.case]
        words += [word for text in public_overrides(self.overrides) for word in ("--set", text)]
        return shlex.join([*words, "--run-id", run_id])

    def request(self, loaded: LoadedJob, folder: RunFolder) -> Request:
        """Return the request for the launch.

        Raises:
            JobRefusedError: a package that the job's modules import is not installed here.
            ScaleError: more nodes are to be simulated than the job may have.
        """
        from elasticflow.compiler.provenance.missing_imports import require_importable
        from elasticflow.launcher.supervisor.launch_record import Request

        require_importable(loaded)
        return Request(
            loaded.job,
            loaded.files,
            self.overrides,
            loaded.project_root,
            folder,
            self.accept_drift,
            self.scale_changes(loaded.job.nodes),
            self.node_rank,
            loaded.case,
        )


def run_id_of(run_id: str | None, case: str | None) -> str:
    """Return the id of a run; for a case, the id ends in the case's name, so that no two cases share a run.

    Raises:
        CaseError: the id is too long.
    """
    whole = run_id or new_run_id()
    if case is not None and not whole.endswith(f"-{case}"):
        whole = f"{whole}-{case}"
    if not RUN_ID.fullmatch(whole):
        raise CaseError(f"the run would be called {whole}, and an id has at most 100 letters")
    return whole


def check_place(loaded: LoadedJob) -> None:
    """Check that the snapshots outlive a package of Ray, if the project lies in one.

    `ray job submit --working-dir` unpacks the project into a folder that Ray removes, and into another one once a file differs.

    Raises:
        RayError: the snapshots would lie in the package.
    """
    root, uri = loaded.project_root.resolve(), loaded.job.snapshots.uri
    if not any(part.startswith(_RAY_PACKAGE) for part in root.parts):
        return
    if uri is None or path_from_root(uri) is not None or str(root) in uri:
        raise RayError(
            f"snapshots.uri: snapshots would lie in {root}, a package that Ray unpacked, and go with it",
            'set snapshots.uri to a place that stays, such as "s3://bucket/prefix" or a folder that all nodes see; or submit without '
            "--working-dir: ray job submit ... -- sh -c 'cd /the/projects/folder && elasticflow run JOB --on ray'",
        )
    warn(f"the run folder lies in {root}, which Ray removes: logs and metrics go with it, snapshots stay")
