"""`elasticflow why [RUN]`: what went wrong, root cause first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json, run_headline, shortest_path, show_damage
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.history import SUPERVISOR_LOST, History
from elasticflow.observe.incidents import data_warnings_of, headline, incidents, overlap_of, restart_anew_of
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.durations import took
from elasticflow.observe.terminal.event_lines import user_frames
from elasticflow.observe.terminal.formats import local_time, plural, rfc3339, span

if TYPE_CHECKING:
    from elasticflow.observe.incidents import Incident


@click.command("why")
@click.argument("run", type=RUN, required=False)
@format_option
def command(run: str | None, form: str) -> None:
    """Say what went wrong in RUN, the newest first: the rank that failed first, its own error, what it cost.

    RUN is a run folder, a run id, or a job's name; default: the newest run.

    \b
    elasticflow why
    elasticflow why mnist --format json
    """
    folder = find_run(current_project_root(), run, by_hand=True)
    show_damage(folder)
    history = History.read(folder)
    failures = incidents(folder, history)
    if form == "json":
        at = [None if incident.at is None else rfc3339(incident.at) for incident in failures]
        print_json([asdict(incident) | {"at": when} for incident, when in zip(failures, at, strict=True)])
        return
    status = read_status(folder)
    count = plural(len(failures), "failure") if failures else "nothing went wrong"
    click.echo(f"{run_headline(status)}, {count}")
    if status.durations:
        click.echo(f"  {paint('took   ', dim=True)} {took(status.durations)}")
    if (stopped := (status.verdict or {}).get("stopped")) is not None:
        click.echo(f"  {paint('stopped', dim=True)} {stopped}")
    if (overlap := overlap_of(history)) is not None:
        click.echo(f"  {paint('overlap', 'yellow')} {overlap}")
    for warning in data_warnings_of(history):
        click.echo(f"  {paint('data   ', 'yellow')} {warning}")
    if (anew := restart_anew_of(history)) is not None:
        click.echo(f"  {paint('restart', 'yellow')} {anew}")
    if failures:
        *earlier, newest = failures
        _print_whole(newest, status.script)
        if earlier:
            click.echo(f"\n{paint('before that', dim=True)}")
        for incident in reversed(earlier):
            click.echo(f"  {local_time(incident.at)}  {headline(incident)}: {_outcome(incident)}")


def _print_whole(incident: Incident, script: str | None) -> None:
    click.echo(f"\n{paint(headline(incident), 'red', bold=True)}")
    for line in (*user_frames(incident.traceback or ""), *incident.stderr):
        click.echo(f"  {line}")
    after = "" if script is not None and incident.step == 0 else f", after step {incident.step}"
    rows = [
        ("when", f"{local_time(incident.at)}, generation {incident.generation}{after}"),
        ("likely", incident.likely),
        ("class", incident.kind),
        ("where", _where(incident)),
        ("phase", incident.phase),
        ("others", incident.others),
        ("then", _outcome(incident)),
        ("log", shortest_path(Path(incident.log)) if incident.log else None),
    ]
    for name, text in rows:
        if text:
            click.echo(f"  {paint(f'{name:<6}', dim=True)} {text}")


def _where(incident: Incident) -> str | None:
    if incident.node is None:
        return None
    return f"node {incident.node}" + ("" if incident.pid is None else f", process {incident.pid}")


def _outcome(incident: Incident) -> str:
    if incident.verdict is not None:
        return f"the run ended: {incident.verdict}"
    if incident.kind == SUPERVISOR_LOST:
        again = "" if incident.redone is None else f", {plural(incident.redone, 'step')} done again"
        return f"free of charge; the same command goes on{again}"
    parts = [
        f"charged, {plural(incident.left or 0, 'restart')} left" if incident.charged else "free of charge"
    ]
    if incident.redone is not None:
        parts.append(f"{plural(incident.redone, 'step')} done again")
    if incident.again is not None:
        name, seconds = incident.again
        parts.append(f"{name} again after {span(seconds)}")
    return ", ".join(parts)
