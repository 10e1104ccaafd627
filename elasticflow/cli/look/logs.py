"""`elasticflow logs [RUN]`: the logs and the printed lines of the workers."""

from __future__ import annotations

import json
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import click

from elasticflow import events
from elasticflow.cli.output import paint, warn
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe import remote_logs
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import is_locked
from elasticflow.observe.terminal.event_lines import stack_of
from elasticflow.observe.terminal.formats import local_time
from elasticflow.observe.worker_logs import LEVELS, LogLine, follow, read_logs
from elasticflow.system.records import unix_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from elasticflow.run_folder import RunFolder

_COLOURS = {"debug": "bright_black", "warning": "yellow", "error": "red", "critical": "red"}
# Seconds between two requests to the hosts of a run that is followed.
_ASK_S = 1.0
# Fields that are not repeated after the event: every line has them, or they are shown before the event.
_LEFT_OUT = {*events.COMMON_FIELDS, *events.WORKER_FIELDS, "logger", "origin", "exception"} - {"step"}


@click.command("logs")
@click.argument("run", type=RUN, required=False)
@click.option("--rank", type=click.IntRange(min=0), help="One worker; default: all.")
@click.option("--generation", type=click.IntRange(min=1), help="One worker group; default: the newest.")
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow the run until it ends.")
@click.option(
    "--level", type=click.Choice(LEVELS[:4]), default="info", help="Lowest level to show; default: info."
)
@click.option(
    "--tail", type=click.IntRange(min=0), help="Number of lines to show, from the end; default: all."
)
@click.option(
    "--steps", is_flag=True, help="Also the lines about steps and evaluations, which `metrics` shows."
)
@format_option
def command(
    *,
    run: str | None,
    rank: int | None,
    generation: int | None,
    is_following: bool,
    level: str,
    tail: int | None,
    steps: bool,
    form: str,
) -> None:
    """Show the log lines of RUN's workers in order of time, then the lines that they printed.

    RUN is a run folder, a run id, or a job's name; default: the newest run. Hosts that share no file system with this
    one send the last MB of each file, on request while the run continues, and when it ends. `elasticflow
    metrics` shows the measurements of steps.

    \b
    elasticflow logs --follow --tail 20
    elasticflow logs mnist --rank 0 --level warning
    elasticflow logs 20261120-104500-4f2a --generation 3 --format json
    """
    folder = find_run(current_project_root(), run, by_hand=True)
    show = _as_json if form == "json" else _as_text
    is_shown = partial(_is_shown, level=level, steps=steps)
    lines: Iterable[LogLine]
    _fetch(folder, generation, rank)
    if is_following:
        lines = _followed(folder, generation, rank, is_shown, tail)
    else:
        lines = filter(is_shown, read_logs(folder, generation, rank))
        lines = lines if tail is None else deque(lines, maxlen=tail)
    for line in lines:
        click.echo(show(line))


def _fetch(folder: RunFolder, generation: int | None, rank: int | None) -> None:
    """Have the run's other hosts send their logs here; name the hosts whose logs cannot be fetched."""
    failure = remote_logs.fetch(folder, generation)
    if failure is not None:
        warn(failure)
    for elsewhere in remote_logs.missing(folder, generation):
        if rank is None or rank in elsewhere.ranks:
            warn(elsewhere.sentence(folder))


def _is_shown(line: LogLine, *, level: str, steps: bool) -> bool:
    return line.is_at_least(level) and (steps or not line.is_measured)


def _followed(
    folder: RunFolder,
    generation: int | None,
    rank: int | None,
    is_shown: Callable[[LogLine], bool],
    tail: int | None,
) -> Iterator[LogLine]:
    asked_at = time.monotonic()

    def pause(seconds: float) -> None:
        nonlocal asked_at
        time.sleep(seconds)
        if time.monotonic() > asked_at + _ASK_S:
            asked_at = time.monotonic()
            remote_logs.ask(folder, generation)

    return follow(
        folder,
        generation,
        rank,
        is_live=partial(is_locked, folder),
        pause=pause,
        is_shown=is_shown,
        backlog=tail,
    )


def _as_json(line: LogLine) -> str:
    if line.record is not None:
        return json.dumps(line.record)
    where = {"generation": line.generation, "rank": line.rank, "stream": line.stream}
    return json.dumps({**where, "text": line.text})


def _as_text(line: LogLine) -> str:
    where = f"g{line.generation} rank{line.rank}"
    record = line.record
    if record is None:
        name = "" if line.stream == "jsonl" else f" {line.stream}"
        return f"{paint(f'{where}{name}', dim=True)}  {line.text}"
    at = unix_time(record.get("timestamp"))
    seconds, thousandths = divmod(round((at or 0) * 1000), 1000)
    clock = "" if at is None else f"{local_time(seconds)[11:]}.{thousandths:03d} "
    level = str(record.get("level", "info"))
    event = str(record.get("event", ""))
    quotes = [row for k, v in record.items() if _is_quote(v) and k != "event" for row in v.splitlines()]
    if isinstance(exception := record.get("exception"), dict) and not record.get("traceback"):
        quotes += stack_of(exception)
    facts = " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in record.items()
        if key not in _LEFT_OUT and not _is_quote(value)
    )
    shown = event if level == "info" else f"{level}: {event}"
    first_line = (
        f"{paint(f'{clock}{where}', dim=True)}  {paint(shown, _COLOURS.get(level), bold=level != 'debug')}"
    )
    return "\n    ".join((f"{first_line}  {facts}".rstrip(), *quotes))


def _is_quote(value: object) -> bool:
    return isinstance(value, str) and "\n" in value
