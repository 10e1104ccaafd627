"""The test message of `elasticflow doctor JOB --notify send`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import print_json, warn

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.sinks.notify.moments import Moment
    from elasticflow.sinks.sink import Options, RunFacts

_RUN_ID = "test"


def send_test_message(job: Job, project_root: Path, *, only_show: bool) -> int:
    """Send a test message in each way that the job's [notify] names, or show the messages; return the exit code.

    Nothing is tried again, and no run is made. Exit code 1 if a message was not delivered.
    """
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.sinks.notify.notifier import tell
    from elasticflow.sinks.sink import SinkError

    if job.notify is None:
        warn("the job has no [notify]: it sends no messages")
        return FINISHED
    run, is_told = _no_run(job, project_root), True
    for name, options in job.notify.ways().items():
        if only_show:
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
