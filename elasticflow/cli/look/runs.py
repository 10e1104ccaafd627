"""`elasticflow runs [JOB]`: the project's runs, the newest first."""

from __future__ import annotations

import click

from elasticflow.cli.facts import COLOURS, evaluation_of, facts_of
from elasticflow.cli.terminal import paint, print_json, show_damage
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.runs import list_runs
from elasticflow.observe.status import RunStatus, read_status
from elasticflow.observe.terminal.formats import local_time, number, span

_HEADER = ("RUN", "JOB", "STATUS", "STEP", "LOSS", "EVALUATION", "STARTED", "TOOK")

# What is most likely of a supervisor that could not say how it ended.
_LOST = {
    "killed": "killed?",
    "out_of_memory": "out of memory?",
    "machine_restarted": "machine restarted",
    "container_restarted": "container restarted",
    "elsewhere": "lost elsewhere",
}


@click.command("runs")
@click.argument("job", required=False)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text.")
def command(job: str | None, form: str) -> None:
    """List the project's runs, or those of one JOB, the one that was launched last first.

    STARTED is when a run began, TOOK the time of all its launches together.

    \b
    elasticflow runs
    elasticflow runs mnist --format json
    """
    root = current_project_root()
    found = [read_status(folder) for folder in list_runs(root, job)]
    for status in found:
        show_damage(status.folder)
    if form == "json":
        print_json([facts_of(status) for status in found])
    elif not found:
        click.echo(f"no runs{f' of {job}' if job else ''} in {root / 'runs'}", err=True)
    else:
        _print_table([_row(status) for status in found], [status.status for status in found])


def _row(status: RunStatus) -> tuple[str, ...]:
    of = "" if status.steps is None else f"/{status.steps}"
    return (
        status.folder.run_id,
        status.folder.job,
        status.status + (f" ({_LOST[status.lost['kind'] or '']})" if status.lost else ""),
        f"{status.step}{of}",
        number(status.loss),
        evaluation_of(status) or "-",
        local_time(status.started),
        span(sum(status.durations.values())) if status.durations else "-",
    )


def _print_table(rows: list[tuple[str, ...]], states: list[str]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    click.echo(
        paint("  ".join(f"{text:<{w}}" for text, w in zip(_HEADER, widths, strict=True)).rstrip(), dim=True)
    )
    for row, state in zip(rows, states, strict=True):
        cells = [f"{text:<{w}}" for text, w in zip(row, widths, strict=True)]
        cells[2] = paint(cells[2], {str(k): v for k, v in COLOURS.items()}[state])
        click.echo("  ".join(cells).rstrip())
