"""What commands print with: colours, tables, JSON, a line of progress, warnings."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Sequence
    from types import FrameType, TracebackType
    from typing import NoReturn

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.observe.status import RunStatus
    from elasticflow.run_folder import RunFolder

STATUS_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red"}
_GAP = "  "
_REDRAW_S = 0.1
_ERASE_LINE = "\r\x1b[K"


def shortest_path(path: Path) -> str:
    """Return *path* as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def paint(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """Return *text* in colour; click takes the colour away where nobody wants it (`main.group`)."""
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None)


def run_headline(status: RunStatus) -> str:
    """Return job and id of a run, and its status in its colour."""
    word = paint(status.status, STATUS_COLOURS[status.status], bold=True)
    return f"{paint(f'{status.folder.job} {status.folder.run_id}', bold=True)}  {word}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    first_to_go: Collection[str] = (),
    paint_cell: Callable[[int, str, str], str] | None = None,
) -> Iterator[str]:
    """Yield the lines of a table: the header, then each row, cells padded to their column's width.

    Args:
        header: Titles of the columns.
        rows: As many cells as there are titles.
        width: Columns of the terminal; None: as wide as it takes.
        first_to_go: Titles of the columns that are left out, in this order, while the table is wider than *width*.
        paint_cell: Takes a row's number, a column's title and the padded cell, and returns the cell in its colour.
    """
    widths = {title: max(map(len, column)) for title, *column in zip(header, header, *rows, strict=True)}
    for title in first_to_go:
        if width is None or sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        widths.pop(title, None)
    yield paint(
        _GAP.join(f"{title:<{widths[title]}}" for title in header if title in widths).rstrip(), dim=True
    )
    for number, row in enumerate(rows):
        cells = []
        for title, text in zip(header, row, strict=True):
            if title in widths:
                cell = f"{text:<{widths[title]}}"
                cells.append(cell if paint_cell is None else paint_cell(number, title, cell))
        yield _GAP.join(cells).rstrip()


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output is; None if it is none."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class ProgressMeter:
    """One line on the terminal that says how much of a long piece of work is done, taken away at the end.

    Where nobody looks (no terminal) nothing is written.

    Args:
        label: What is done.
        total: All of it.
        words: Takes what is done, *total* and seconds since the beginning; returns what the line says.
        out: Where; default: standard error.
    """

    def __init__(
        self,
        label: str,
        total: int,
        words: Callable[[int, int, float], str] | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._label, self._total, self._words = label, total, words or bytes_done
        self._out = out or sys.stderr
        self._began = time.monotonic()
        self._next = self._began + _REDRAW_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def __call__(self, done: int) -> None:
        """Say that so much is done; drawn ten times a second at most."""
        now = time.monotonic()
        if now >= self._next and self._out.isatty():
            self._next = now + _REDRAW_S
            self._out.write(f"\r{self._label}  {self._words(done, self._total, now - self._began)}\x1b[K")
            self._out.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._out.isatty():
            self._out.write(_ERASE_LINE)
            self._out.flush()


def bytes_done(done: int, total: int, seconds: float) -> str:
    """Return `1.2 GB of 2.4 GB (50 %), 480.0 MB/s, 2.50 s left`."""
    from elasticflow.observe.terminal.formats import size, span

    share = 100 * done // total if total else 100
    text = f"{size(done)} of {size(total)} ({share} %)"
    if seconds <= 0 or not done:
        return text
    left = (total - done) * seconds / done
    return f"{text}, {size(done / seconds)}/s, {span(left)} left"


def steps_done(done: int, total: int, seconds: float) -> str:
    """Return `starting`, then `step 12 of 50`."""
    return "starting" if done == 0 else f"step {done} of {total}"


def print_json(facts: Any) -> None:
    """Print *facts* as indented JSON."""
    click.echo(json.dumps(facts, indent=2, default=str))


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    from elasticflow.system.records import printable

    click.echo(f"warning: {printable(sentence)}", err=True)


def show_damage(folder: RunFolder) -> None:
    """Say on standard error which files of a run are damaged, so that what is shown does without them."""
    from elasticflow.observe.records import damages_of

    for damage in damages_of(folder):
        click.echo(f"warning: {shortest_path(Path(damage.place))} {damage.why}; shown without it", err=True)


def show_warnings(loaded: LoadedJob, *, but: Container[str] = ()) -> None:
    """Print the warnings about a job file, except those whose code is in *but*, on standard error, one line each."""
    from elasticflow.jobfile.diagnostics.render_text import render

    warnings = [each for each in loaded.diagnostics if each.severity == "warning" and each.code not in but]
    if warnings:
        click.echo(render(warnings, "concise"), err=True)


def interrupt_on_signals() -> None:
    """Have SIGTERM and SIGHUP do what Ctrl-C does: whatever was started ends, scratch folders go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
