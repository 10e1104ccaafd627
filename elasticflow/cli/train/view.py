"""Makes a launch for `run` and `resume`, and shows it: for people, or as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import run_word, shortest_path, warn
from elasticflow.protocol.run_files import is_only_shown

if TYPE_CHECKING:
    from elasticflow.events import EventRecord
    from elasticflow.launcher.supervisor.launch_record import Request

log_format_option = click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    envvar="ELASTICFLOW_LOG_FORMAT",
    show_default=True,
    show_envvar=True,
    help="Lines for people, or every event and metrics line as JSON.",
)


def launch_shown(request: Request, log_format: str) -> int:
    """Launch the request, with the process for its sinks; show the launch on standard output; return the exit code."""
    from elasticflow.launcher.launch import launch
    from elasticflow.observe.live_view import LiveView
    from elasticflow.sinks.registry import serving_command

    request = replace(request, follower=serving_command(request.job))
    if log_format == "json":
        return launch(request, _print_json, warn)
    view = LiveView.on(sys.stdout, os.environ, shortest_path(request.folder.path), run_word(request.folder))
    try:
        return launch(request, view.show, warn, view.tick)
    finally:
        view.close()


def _print_json(record: EventRecord) -> None:
    if is_only_shown(record):
        return
    # The run continues even if nothing reads its records any more.
    with suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
