"""`elasticflow runs [list] [JOB]`: the project's runs, the newest first."""

from __future__ import annotations

import click

from elasticflow.cli.output import STATUS_COLOURS, paint, print_json, show_damage, table, terminal_width
from elasticflow.cli.parameters import JOB_NAME, format_option
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.runs import list_runs
from elasticflow.observe.status import RunStatus, read_status
from elasticflow.observe.terminal.formats import local_time, number, percent, span

_HEADER = ("RUN", "JOB", "STATUS", "STEP", "LOSS", "EVALUATION", "STARTED", "TOOK", "GOODPUT")
# These columns are left out first in a narrow terminal; `status` and JSON have them all.
_FIRST_TO_GO = ("STARTED", "LOSS", "GOODPUT", "TOOK", "EVALUATION")


@click.command("list")
@click.argument("job", type=JOB_NAME, required=False)
@format_option
def command(job: str | None, form: str) -> None:
    """List the project's runs, or those of one JOB, the last launched first.

    STARTED is when a run began, TOOK the time of all its launches together, GOODPUT the share of this time that was
    spent on steps that count.

    \b
    elasticflow runs list
    elasticflow runs list mnist --format json
    """
    root = current_project_root()
    statuses = [read_status(folder) for folder in list_runs(root, job, by_hand=True)]
    for status in statuses:
        show_damage(status.folder)
    if form == "json":
        print_json([status.to_json() for status in statuses])
    elif not statuses:
        click.echo(f"no runs{f' of {job}' if job else ''} in {root / 'runs'}", err=True)
    else:
        rows = map(_row, statuses)
        click.echo("\n".join(table(_HEADER, rows, width=terminal_width(), first_to_go=_FIRST_TO_GO)))


def _row(status: RunStatus) -> tuple[str, ...]:
    of = "" if status.steps is None else f"/{status.steps}"
    # The likely end of a supervisor that could not record its own end.
    lost = f" ({status.lost.kind.replace('_', ' ')}?)" if status.lost else ""
    return (
        status.folder.run_id,
        status.folder.job,
        paint(status.status + lost, STATUS_COLOURS[status.status]),
        "-" if status.script is not None and status.step == 0 else f"{status.step}{of}",
        number(status.loss),
        status.main_metrics or "-",
        local_time(status.started),
        span(sum(status.durations.values())) if status.durations else "-",
        percent(status.goodput),
    )
