"""`elasticflow sinks test JOB`: a test message by the job's [notify]."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import print_json, warn
from elasticflow.cli.parameters import JOB_FILE, case_option, job_of, overrides_option

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.sinks.notify.moments import Moment
    from elasticflow.sinks.sink import Options, RunFacts

_RUN_ID = "test"


@click.command("test")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@overrides_option
@case_option
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
def command(*, job_file: Path, overrides: tuple[str, ...], case: str | None, dry_run: bool) -> int:
    """Send a test message in each way that the [notify] of JOB names, before a long run.

    Exit code 1 if a message was not delivered. Nothing is tried again, and no run is made.

    \b
    elasticflow sinks test jobs/mnist.toml
    elasticflow sinks test jobs/mnist.toml --dry-run
    """
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.sinks.notify.notifier import tell
    from elasticflow.sinks.sink import SinkError

    loaded = job_of(job_file, overrides, case)
    assert loaded.job is not None
    if loaded.job.notify is None:
        warn("the job has no [notify]: it sends no messages")
        return FINISHED
    run, is_told = _no_run(loaded.job, loaded.project_root), True
    for name, options in loaded.job.notify.ways().items():
        if dry_run:
            _show(name, options, run)
            continue
        try:
            tell(_test_message(), run, options)
        except SinkError as error:
            is_told = False
            click.echo(f"{name}: {error}")
        else:
            click.echo(f"{name}: sent")
    return FINISHED if is_told else ANSWER_IS_NO


def _show(name: str, options: Options, run: RunFacts) -> None:
    from elasticflow.sinks.notify.message import object_of, payload_of

    click.echo(f"{name}:")
    moment = _test_message()
    print_json(object_of(moment, run) if "command" in options else payload_of(moment, run, options["format"]))


def _no_run(job: Job, project_root: Path) -> RunFacts:
    """Return the facts of an imaginary run of *job*."""
    from elasticflow.run_folder import RunFolder
    from elasticflow.sinks.sink import RunFacts

    folder = RunFolder.of(project_root, job.job.name, _RUN_ID)
    return RunFacts(_RUN_ID, job.job.name, folder.path.absolute(), project_root)


def _test_message() -> Moment:
    from elasticflow.sinks.notify.moments import Moment

    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return Moment(None, now, "is no run: this is a test of [notify], and this is how it would tell you")
