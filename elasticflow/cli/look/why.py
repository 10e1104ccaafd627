"""`elasticflow why [RUN]`: the failures of a run, root cause first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json, run_headline, shortest_path, show_damage
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.history import SUPERVISOR_LOST, RunHistory
from elasticflow.observe.incidents import incidents, log_of, note_rows, to_json
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.activities import ENDING
from elasticflow.observe.terminal.event_lines import user_frames
from elasticflow.observe.terminal.formats import local_time, plural, span, took

if TYPE_CHECKING:
    from elasticflow.observe.history import Stop
    from elasticflow.run_folder import RunFolder


@click.command("why")
@click.argument("run", type=RUN, required=False)
@format_option
def command(run: str | None, form: str) -> None:
    """Show what went wrong in RUN, the newest failure first: the rank that failed first, its error, the cost.

    RUN is a run folder, a run id, or a job's name; default: the newest run.

    \b
    elasticflow why
    elasticflow why mnist --format json
    """
    folder = find_run(current_project_root(), run, by_hand=True)
    show_damage(folder)
    history = RunHistory.read(folder)
    failures = incidents(folder, history)
    if form == "json":
        print_json([to_json(stop, folder) for stop in failures])
        return
    status = read_status(folder)
    so_far = " so far" if status.status == "running" else ""
    count = plural(len(failures), "failure") if failures else f"nothing went wrong{so_far}"
    click.echo(f"{run_headline(status)}, {count}")
    if status.durations:
        click.echo(f"  {paint('took   ', dim=True)} {took(status.durations, is_blind=status.has_no_steps)}")
    if history.redone and len(failures) > 1:
        click.echo(
            f"  {paint('again  ', dim=True)} {plural(history.redone, 'step')} done again, after all failures"
        )
    if (stopped := (status.verdict or {}).get("stopped")) is not None:
        click.echo(f"  {paint('stopped', dim=True)} {stopped}")
    if status.doing is not None and status.doing.label == ENDING:
        click.echo(
            f"  {paint('now    ', dim=True)} {status.doing.text}, since {local_time(status.doing.since)}"
        )
    for label, text in note_rows(history):
        click.echo(f"  {paint(f'{label:<7}', 'yellow')} {text}")
    if failures:
        *earlier, newest = failures
        _print_whole(newest, folder, status.script)
        if earlier:
            click.echo(f"\n{paint('before that', dim=True)}")
        for stop in reversed(earlier):
            click.echo(f"  {local_time(stop.at)}  {stop.headline}: {_outcome(stop)}")


def _print_whole(stop: Stop, folder: RunFolder, script: str | None) -> None:
    click.echo(f"\n{paint(stop.headline, 'red', bold=True)}")
    for line in (*user_frames(stop.traceback or ""), *stop.stderr):
        click.echo(f"  {line}")
    after = "" if script is not None and stop.step == 0 else f", after step {stop.step}"
    where = stop.node and f"node {stop.node}" + ("" if stop.pid is None else f", process {stop.pid}")
    rows = [
        ("when", f"{local_time(stop.at)}, generation {stop.generation}{after}"),
        ("likely", stop.likely),
        ("class", stop.kind),
        ("where", where),
        ("phase", stop.phase),
        ("others", stop.others),
        ("then", _outcome(stop)),
        ("log", shortest_path(Path(log)) if (log := log_of(stop, folder)) else None),
        # The command that reads what NCCL's flight recorders dumped.
        ("collectives", stop.dumps_folder and f"torchfrtrace {shortest_path(Path(stop.dumps_folder))}"),
    ]
    shown = [(name, text) for name, text in rows if text]
    width = max(len("others"), *(len(name) for name, _ in shown))
    for name, text in shown:
        click.echo(f"  {paint(f'{name:<{width}}', dim=True)} {text}")


def _outcome(stop: Stop) -> str:
    if stop.verdict is not None:
        return f"the run ended: {stop.verdict}"
    if stop.kind == SUPERVISOR_LOST:
        again = "" if stop.redone is None else f", {plural(stop.redone, 'step')} done again"
        return f"free of charge; the same command resumes the run{again}"
    parts = [f"charged, {plural(stop.left or 0, 'restart')} left" if stop.charged else "free of charge"]
    if stop.redone is not None:
        parts.append(f"{plural(stop.redone, 'step')} done again")
    if stop.again is not None:
        name, seconds = stop.again
        parts.append(f"{name} again after {span(seconds)}")
    return ", ".join(parts)
