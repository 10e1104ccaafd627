"""How `run` and `resume` show a launch: for people, or as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

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


@contextmanager
def shown(log_format: str, folder: Path) -> Iterator[Callable[[EventRecord], None]]:
    """Yield the function that shows one event or metrics record on standard output.

    Args:
        log_format: `console` or `json`.
        folder: The run folder, named at the end.
    """
    if log_format == "json":
        yield _print_json
        return
    from elasticflow.cli.output import shortest_path
    from elasticflow.observe.terminal.live_view import LiveView

    view = LiveView.on(sys.stdout, os.environ, shortest_path(folder))
    try:
        yield view.show
    finally:
        view.close()


def _print_json(record: EventRecord) -> None:
    # The run goes on even if nobody reads its records any more.
    with suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
