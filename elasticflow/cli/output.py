"""Output of commands: colours, tables, JSON, a line of progress, warnings.

rich is imported only to draw a table: other commands start without it.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TextIO

import click

from elasticflow.run_folder import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence
    from types import FrameType
    from typing import NoReturn

    from rich.console import Console

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.render_text import Format
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.observe.status import RunStatus
    from elasticflow.protocol.key_weights import Weight
    from elasticflow.run_folder import RunFolder

STATUS_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red"}
_GAP = 2
_WIDEST = 10**6
_REDRAW_S = 0.1


def shortest_path(path: Path) -> str:
    """Return the shortest form of *path* that can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run_word(folder: RunFolder) -> str:
    """Return the RUN by which a command typed here finds the run: its id, or its folder if it lies in another project."""
    from elasticflow.jobfile.project import current_project_root

    is_here = folder.path.is_relative_to(current_project_root() / RUNS)
    return folder.run_id if is_here else shell_path(folder.path)


def shell_path(path: Path) -> str:
    """Return the shortest form of *path* as a word of a command that is printed to be copied."""
    return shlex.quote(shortest_path(path.absolute()))


def paint(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """Return *text* in colour; `click.echo` removes colours where they are not wanted (`main.group`)."""
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None)


def paint_weight(text: str, weight: Weight) -> str:
    """Return *text* in the colour of a difference of this weight."""
    return paint(text, {"corrupting": "red", "trajectory": "yellow", "harmless": "green"}[weight], bold=True)


def cut(text: str, most: int) -> str:
    """Return *text* if it has at most *most* letters, and otherwise its beginning and `...`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def run_headline(status: RunStatus) -> str:
    """Return job and id of a run, and its status in its colour."""
    word = paint(status.status, STATUS_COLOURS[status.status], bold=True)
    return f"{paint(f'{status.folder.job} {status.folder.run_id}', bold=True)}  {word}"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    width: int | None = None,
    first_to_go: Iterable[str] = (),
    justify: Literal["left", "right"] = "left",
) -> Iterator[str]:
    """Yield the lines of a table: the header, then the rows; no cell is cut or wrapped.

    Args:
        header: Titles of the columns; a title may have several lines.
        rows: Rows with one cell for each title, painted or not.
        width: Columns of the terminal; None: no limit.
        first_to_go: Titles of the columns that are left out, in this order, while the table is wider than *width*.
    """
    from rich.table import Table
    from rich.text import Text

    console = _console(io.StringIO(), width=_WIDEST)
    columns = {
        title: [Text.from_ansi(cell) for cell in (paint(title, dim=True), *cells)]
        for title, *cells in zip(header, *rows, strict=True)
    }
    widths = {title: max(console.measure(cell).maximum for cell in cells) for title, cells in columns.items()}
    for title in first_to_go:
        if width is None or sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        widths.pop(title, None)
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for title in widths:
        grid.add_column(title, justify=justify, no_wrap=True)
    for cells in zip(*(columns[title] for title in widths), strict=True):
        grid.add_row(*cells)
    with console.capture() as lines:
        console.print(grid)
    yield from (line.rstrip() for line in lines.get().splitlines())


def terminal_width() -> int | None:
    """Return the width of the terminal on standard output in columns; None if standard output is no terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _console(file: TextIO, *, width: int | None = None) -> Console:
    """Return rich's console on *file*, set up for a terminal; `click.echo` removes colours where they are not wanted.

    By default rich reads the environment, and cuts lines on a pipe at 80 columns.
    """
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        force_terminal=True,
        color_system="standard",
        no_color=False,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def as_laid_out(markdown: str, width: int) -> str:
    """Return Markdown formatted for a terminal: wrapped at *width*, painted; links keep their targets in words."""
    from rich.markdown import Markdown
    from rich.theme import Theme

    console = _console(io.StringIO(), width=width)
    # No backgrounds, which suit one kind of terminal only.
    plain = Theme(
        {"markdown.code": "cyan", "markdown.code_block": "none", "markdown.h1": "bold", "markdown.h2": "bold"}
    )
    with console.use_theme(plain), console.capture() as laid_out:
        console.print(Markdown(markdown, code_theme="ansi_dark", hyperlinks=False))
    return "".join(f"{line.rstrip()}\n" for line in laid_out.get().splitlines())


class ProgressMeter:
    """A line on the terminal that shows the progress of long work, and is removed at the end.

    Without a terminal nothing is written.

    Args:
        words: Takes the amount done, *total* and the seconds so far; returns the text of the line.
        out: Stream of the line; default: standard error.
    """

    def __init__(
        self,
        label: str,
        total: int,
        words: Callable[[int, int, float], str] | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._label, self._total, self._words = label, total, words or bytes_done
        from elasticflow.observe.terminal.colours import can_redraw
        from elasticflow.observe.terminal.screen import Screen

        out = out or sys.stderr
        self._screen = Screen(out, tty=can_redraw(out, os.environ), colour=False)
        self._began = self._drawn_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def __call__(self, done: int) -> None:
        """Show the amount *done*; short work shows no line."""
        from elasticflow.observe.terminal.screen import Part

        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._screen.draw([[Part(f"{self._label}  {self._words(done, self._total, self.seconds)}")]])

    def clear(self) -> None:
        """Remove the line."""
        self._screen.close()


def bytes_done(done: int, total: int, seconds: float) -> str:
    """Return `1.2 GB of 2.4 GB (50 %), 480.0 MB/s, 2.5 s left`."""
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


def print_json(facts: object) -> None:
    """Print *facts* as indented JSON."""
    click.echo(json.dumps(facts, indent=2, default=str))


def write_file(target: Path, text: str) -> int:
    """Write *text* to *target*, whole or not at all, and to a pipe or a device as it is; return its size in bytes.

    Raises:
        ElasticflowError: the file cannot be written.
    """
    from elasticflow.errors import ElasticflowError
    from elasticflow.system import atomic_files

    data = text.encode("utf-8", "replace")
    try:
        if target.exists() and not (target.is_file() or target.is_dir()):
            # A file in the place of /dev/null would be in the way of every program.
            return target.write_bytes(data)
        return atomic_files.write(Path(os.path.realpath(target)), [data])
    except OSError as error:
        raise ElasticflowError(
            f"{target} cannot be written: {error.strerror}", "choose a place: -o FILE"
        ) from error


def agreed(question: str) -> bool:
    """Return the user's answer.

    Raises:
        UsageError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: give --yes, or --dry-run to look only")
    return click.confirm(question, err=True)


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    from elasticflow.system.records import printable

    click.echo(f"warning: {printable(sentence)}", err=True)


def show_damage(folder: RunFolder) -> None:
    """Name the damaged files of a run on standard error; the command ignores them."""
    from elasticflow.observe.records import damages_of

    for damage in damages_of(folder):
        click.echo(f"warning: {shortest_path(Path(damage.place))} {damage.why}; shown without it", err=True)


def counts_of(findings: Sequence[Diagnostic], severities: Sequence[str] = ("error", "warning")) -> str:
    """Return `2 errors, 1 warning`; empty if there is no finding of these severities."""
    from elasticflow.observe.terminal.formats import plural

    counts = {severity: sum(each.severity == severity for each in findings) for severity in severities}
    return ", ".join(plural(count, severity) for severity, count in counts.items() if count)


def report_findings(
    findings: Sequence[Diagnostic],
    shown: Sequence[Diagnostic],
    style: Format,
    summary: Callable[[], str],
    *,
    strict: bool,
) -> int:
    """Print the findings in *shown*, and for people the summary; return the exit code of all findings."""
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.jobfile.diagnostics.render_text import render
    from elasticflow.observe.terminal.colours import wants_colour

    if text := render(shown, style, colour=wants_colour(sys.stdout, os.environ)):
        click.echo(text, color=True)
    if style in {"full", "concise"}:
        click.echo(("\n" if shown and style == "full" else "") + summary())
    if style == "full" and shown:
        click.echo(f"`elasticflow guide {shown[0].code}` says more, with an example")
    severities = {each.severity for each in findings}
    return ANSWER_IS_NO if "error" in severities or (strict and "warning" in severities) else FINISHED


def show_warnings(loaded: LoadedJob, *, but: Container[str] = ()) -> None:
    """Print the warnings about a job file on standard error, one line each, except those whose code is in *but*."""
    from elasticflow.jobfile.diagnostics.render_text import render

    warnings = [
        diagnostic
        for diagnostic in loaded.diagnostics
        if diagnostic.severity == "warning" and diagnostic.code not in but
    ]
    if warnings:
        click.echo(render(warnings, "concise"), err=True)


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP act like Ctrl-C: child processes end, scratch folders are removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
