"""What the commands that print facts share: where the project is, JSON, colours."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Container
    from types import FrameType
    from typing import NoReturn

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.run_folder import RunFolder


def short(path: Path) -> str:
    """Return *path* as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def paint(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """Return *text* in colour; click takes the colour away where nobody would see it."""
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None)


def show_damage(folder: RunFolder) -> None:
    """Say on standard error which files of a run are damaged, so that what is shown does without them."""
    from elasticflow.observe.records import damages_of

    for damage in damages_of(folder):
        path = Path(damage.place)
        click.echo(f"warning: {short(path)} {damage.why}; shown without it", err=True)


def interrupted_by_signals() -> None:
    """Have SIGTERM and SIGHUP do what Ctrl-C does: whatever was started ends, scratch folders go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def print_json(facts: Any) -> None:
    """Print *facts* as indented JSON."""
    click.echo(json.dumps(facts, indent=2, default=str))


def show_warnings(loaded: LoadedJob, *, but: Container[str] = ()) -> None:
    """Print the warnings about a job file, except those whose code is in *but*, on standard error, one line each."""
    from elasticflow.jobfile.diagnostics.render_text import render

    found = [each for each in loaded.diagnostics if each.severity == "warning" and each.code not in but]
    if found:
        click.echo(render(found, "concise"), err=True)
