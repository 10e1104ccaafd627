"""Shows a launch of `run` and `resume`: for people, or as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import click

from elasticflow.protocol.run_files import is_only_shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.events import EventRecord

log_format_option = click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    envvar="ELASTICFLOW_LOG_FORMAT",
    show_default=True,
    show_envvar=True,
    help="Lines for people, or every event and metrics line as JSON.",
)


class Shown(NamedTuple):
    """Shows records on standard output (`show`), and updates the clock (`tick`, to be called several times a second)."""

    show: Callable[[EventRecord], None]
    tick: Callable[[], None] | None = None


@contextmanager
def shown(log_format: str, folder: Path) -> Iterator[Shown]:
    """Yield the functions that show a launch on standard output.

    Args:
        log_format: `console` or `json`.
        folder: The run folder, named at the end.
    """
    if log_format == "json":
        yield Shown(_print_json)
        return
    from elasticflow.cli.output import shortest_path
    from elasticflow.observe.live_view import LiveView

    view = LiveView.on(sys.stdout, os.environ, shortest_path(folder))
    try:
        yield Shown(view.show, view.tick)
    finally:
        view.close()


def _print_json(record: EventRecord) -> None:
    if is_only_shown(record):
        return
    # The run continues even if nothing reads its records any more.
    with suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
