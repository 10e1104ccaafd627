"""`elasticflow sinks test JOB`: a message to those whom the job's [notify] names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import print_json, warn
from elasticflow.cli.parameters import JOB_FILE, case_option, job_of, overrides_option

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.sinks.sink import Options, RunFacts


@click.command("test")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@overrides_option
@case_option
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
def command(*, job_file: Path, overrides: tuple[str, ...], case: str | None, dry_run: bool) -> int:
    """Send a test message in each way that the [notify] of JOB names: before a long run, not after it.

    Exit code 1 if one did not get through. Nothing is tried again, and no run is made.

    \b
    elasticflow sinks test jobs/mnist.toml
    elasticflow sinks test jobs/mnist.toml --dry-run
    """
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.notify.notifier import tell
    from elasticflow.notify.trial import facts_of, moment
    from elasticflow.sinks.sink import SinkError

    loaded = job_of(job_file, overrides, case)
    assert loaded.job is not None
    if loaded.job.notify is None:
        warn("the job has no [notify]: it tells nobody")
        return FINISHED
    run, is_told = facts_of(loaded.job, loaded.project_root), True
    for name, options in loaded.job.notify.ways().items():
        if dry_run:
            _show(name, options, run)
            continue
        try:
            tell(moment(), run, options)
        except SinkError as error:
            is_told = False
            click.echo(f"{name}: {error}")
        else:
            click.echo(f"{name}: sent")
    return FINISHED if is_told else ANSWER_IS_NO


def _show(name: str, options: Options, run: RunFacts) -> None:
    from elasticflow.notify.message import object_of, payload_of
    from elasticflow.notify.trial import moment

    click.echo(f"{name}:")
    print_json(
        object_of(moment(), run) if "command" in options else payload_of(moment(), run, options["format"])
    )
