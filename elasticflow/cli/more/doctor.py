"""`elasticflow doctor [JOB]`: checks that this machine can run jobs, or has all that one job needs."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import print_json, warn
from elasticflow.cli.parameters import JOB_FILE, case_option, format_option, job_of, overrides_option

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.doctor.check import CheckResult, Needs

_WIDTH = 19
_RUN_ID = "test"
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command("doctor")
@click.argument("job_file", metavar="[JOB]", type=JOB_FILE, required=False)
@overrides_option
@case_option
@format_option
@click.option(
    "--notify",
    type=click.Choice(["send", "show"]),
    help="Only send a test message in each way that the [notify] of JOB names, or show what would be sent.",
)
def command(
    job_file: Path | None, overrides: tuple[str, ...], case: str | None, form: str, notify: str | None
) -> int:
    """Check this machine: torch and its devices, limits, memory, ports, storage, clock; explain each result.

    With JOB: also all that the job needs, such as its snapshot store, endpoint and interface. Small files are written
    and removed again. Exit code: 0 no problem, 1 some, 2 the job file cannot be read.

    \b
    elasticflow doctor
    elasticflow doctor jobs/mnist.toml
    elasticflow doctor jobs/mnist.toml --set snapshots.uri=s3://bucket/mnist --format json
    elasticflow doctor jobs/mnist.toml --notify send
    """
    from dataclasses import asdict

    from elasticflow.cli.output import interrupt_on_signals
    from elasticflow.doctor.questions import examine
    from elasticflow.errors import ANSWER_IS_NO, FINISHED

    if notify is not None:
        if form == "json":
            raise click.UsageError("--notify tells a person; --format json is for the checks")
        return _notify(job_file, overrides, case, only_show=notify == "show")
    needs = _needs(job_file, overrides, case)
    interrupt_on_signals()
    if form == "json":
        results = list(examine(needs, lambda _: None))
        print_json([asdict(result) for result in results])
    else:
        results = _shown(needs)
    return ANSWER_IS_NO if any(result.verdict == "problem" for result in results) else FINISHED


def _notify(job_file: Path | None, overrides: tuple[str, ...], case: str | None, *, only_show: bool) -> int:
    """Send a test message in each way that the job's [notify] names, or show the messages; return the exit code.

    Nothing is tried again, and no run is made. Exit code 1 if a message was not delivered.
    """
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.run_folder import RunFolder
    from elasticflow.sinks.notify.message import object_of, payload_of
    from elasticflow.sinks.notify.moments import Moment
    from elasticflow.sinks.notify.notifier import tell
    from elasticflow.sinks.sink import RunFacts, SinkError

    if job_file is None:
        raise click.UsageError("--notify is about the [notify] of a job file, and none was given")
    loaded = job_of(job_file, overrides, case)
    if loaded.job.notify is None:
        warn("the job has no [notify]: it sends no messages")
        return FINISHED
    name, root = loaded.job.job.name, loaded.project_root
    run = RunFacts(_RUN_ID, name, RunFolder.of(root, name, _RUN_ID).path.absolute(), root)
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    test = Moment(None, now, "is no run: this is a test of [notify], and this is how it would tell you")
    is_told = True
    for way, options in loaded.job.notify.ways().items():
        if only_show:
            click.echo(f"{way}:")
            print_json(
                object_of(test, run) if "command" in options else payload_of(test, run, options["format"])
            )
            continue
        try:
            tell(test, run, options)
        except SinkError as error:
            is_told = False
            click.echo(f"{way}: {error}")
        else:
            click.echo(f"{way}: sent")
    return FINISHED if is_told else ANSWER_IS_NO


def _needs(job_file: Path | None, overrides: tuple[str, ...], case: str | None) -> Needs:
    from elasticflow.doctor.questions import needs_of
    from elasticflow.jobfile.project import current_project_root

    if job_file is None:
        if overrides or case:
            raise click.UsageError("--set and --case are about a job file, and none was given")
        return needs_of(current_project_root())
    loaded = job_of(job_file, overrides, case)
    return needs_of(loaded.project_root, loaded.job, job_file)


def _shown(needs: Needs) -> list[CheckResult]:
    from elasticflow.cli.output import paint
    from elasticflow.doctor.questions import examine
    from elasticflow.observe.terminal.formats import plural

    topic, results = "", []
    for result in examine(needs, _wait):
        results.append(result)
        if result.topic != topic:
            topic = result.topic
            click.echo(paint(topic, bold=True))
        mark, colour = _MARKS[result.verdict]
        click.echo(f"  {paint(mark, colour)} {result.name:<{_WIDTH}} {result.fact}")
        for lead, text in (("", result.meaning), (paint("do: ", bold=True), result.remedy)):
            if text:
                click.echo(f"    {'':<{_WIDTH}} {lead}{text}")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _MARKS}
    problems, warnings = plural(counts["problem"], "problem"), plural(counts["warning"], "warning")
    colour = "red" if counts["problem"] else "yellow" if counts["warning"] else "green"
    click.echo(f"\n{paint(f'{problems}, {warnings}', colour, bold=True)}")
    return results


def _wait(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"  ... {what}", err=True)
