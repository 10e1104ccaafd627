"""A run on a person's screen: a line for each important event, and below them the present state; without torch."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from elasticflow import events
from elasticflow.observe.history import RunHistory
from elasticflow.observe.narrator import RunNarrator
from elasticflow.observe.run_board import LABEL_WIDTH, TEXT_COLUMN, TIME_WIDTH, RunBoard
from elasticflow.observe.terminal.colours import can_redraw, wants_colour
from elasticflow.observe.terminal.formats import elapsed, plural
from elasticflow.observe.terminal.screen import Screen
from elasticflow.protocol import run_files
from elasticflow.system.records import Record, int_of, printable_in, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.events import Symbol, Tone
    from elasticflow.observe.terminal.event_lines import Line
    from elasticflow.observe.terminal.screen import Row

DRAW_EVERY_S = 0.1
# Intervals between lines of progress, or about a long activity, in a file; for the same activity they grow.
PLAIN_EVERY_S = 10.0
PLAIN_MOST_S = 60.0

# Symbols beyond ASCII, each with its ASCII form.
_SYMBOLS: dict[Symbol, str] = {
    "start": "→>", "done": "✓+", "wrong": "✗x", "again": "↻@", "stop": "■#", "note": "·-", "warning": "!!",
}  # fmt: skip
# Colours of the label and of the text.
_COLOURS: dict[Tone, tuple[str, str]] = {
    "begin": ("36", "1"), "good": ("32", "1"), "bad": ("31", "1"), "notice": ("33", ""), "plain": ("", ""), "quiet": ("2", "2"),
}  # fmt: skip
_DIM = "2"


class LiveView:
    """Shows records as they come; never fails: if the stream is closed, the view is silent.

    Args:
        stream: Stream to write to; it is not closed.
        tty: True: the stream is a terminal, and the present state is drawn in place.
        folder: The run folder, as the text to show at the end.
        run: The word by which commands find the run; default: its id.
        clock: Returns seconds, for throttling only.
        wall: Returns the Unix time.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        tty: bool,
        colour: bool,
        folder: str | None = None,
        run: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._screen = Screen(stream, tty=tty, colour=colour)
        self._clock, self._wall = clock, wall
        self._history = RunHistory()
        self._narrator, self._board = RunNarrator(self._history, folder, run), RunBoard(self._history)
        self._symbols = {name: signs[not self._screen.pretty] for name, signs in _SYMBOLS.items()}
        self._drawn_at = clock() - DRAW_EVERY_S
        # For a stream that is no terminal: the times of its last line of progress and its last line, and the longest
        # silence.
        self._told_at = self._wrote_at = clock()
        self._silence_s, self._silent_about = PLAIN_EVERY_S, ""
        self._run_id = ""
        self._has_printed = False

    @classmethod
    def on(
        cls,
        stream: TextIO,
        environment: Mapping[str, str],
        folder: str | None = None,
        run: str | None = None,
    ) -> LiveView:
        """Return a view that suits *stream*: TERM=dumb means no redrawing."""
        tty = can_redraw(stream, environment)
        colour = wants_colour(stream, {"TERM": "dumb", **environment})
        return cls(stream, tty=tty, colour=colour, folder=folder, run=run)

    def show(self, record: Record) -> None:
        """Show a record of events.jsonl, of metrics.jsonl, or of neither (`protocol/run_files.py`)."""
        known = record.get(run_files.KNOWN)
        if isinstance(known, Mapping):
            self._board.known(known)
            self._draw()
        elif run_files.PRINTED in record:
            self._printed(record)
        elif record.get("event") in {events.STEP, events.EVALUATION} or "event" not in record:
            self.metrics(record)
        else:
            self.event(record)

    def event(self, record: Record) -> None:
        """Show a record of events.jsonl."""
        record = printable_in(dict(record))
        self._run_id = text_of(record, "run_id") or self._run_id
        line = self._narrator.event(record)
        self._history.take(record)
        self._history.forget()
        self._board.event(record)
        if line is not None:
            self._show(line)
        else:
            self._draw()

    def metrics(self, record: Record) -> None:
        """Show a record of metrics.jsonl: an evaluation as a line, a step as progress."""
        line = self._narrator.metrics(record)
        self._board.metrics(record)
        if line is not None:
            self._show(line)
        elif self._screen.tty:
            self._draw()
        elif (now := self._clock()) - self._told_at >= PLAIN_EVERY_S and (parts := self._progress()):
            self._told_at = now
            seconds = self._narrator.seconds(record)
            self._plain("" if seconds is None else elapsed(seconds), "training", "  ".join(parts))

    def tick(self) -> None:
        """Update the view for the time that has passed; to be called several times a second."""
        if self._screen.tty:
            self._draw()
            return
        now = self._wall()
        doing = self._board.now(now)
        about = "" if doing is None else f"{doing.label} {doing.text}"
        if about != self._silent_about:
            self._silent_about, self._silence_s = about, PLAIN_EVERY_S
        if doing is None or self._clock() - self._wrote_at < self._silence_s:
            return
        self._silence_s = min(PLAIN_MOST_S, 2 * self._silence_s)
        self._plain(self._now(), doing.label, doing.lasting(now))

    def close(self) -> None:
        """Remove the rows that are drawn in place; the stream stays open."""
        self._screen.close()

    def _show(self, line: Line) -> None:
        paint, (label_colour, text_colour) = self._screen.paint, _COLOURS[line.tone]
        seconds = "" if line.seconds is None else elapsed(line.seconds)
        clock = paint(f"{seconds:>{TIME_WIDTH}}", _DIM)
        label = paint(f"{self._symbols[line.symbol]} {line.label:<{LABEL_WIDTH}}", label_colour)
        indent = " " * TEXT_COLUMN
        rows = [indent + paint(row, text_colour) for row in self._wrap(line.text)]
        rows[0] = f"{clock}  {label}  {rows[0].removeprefix(indent)}"
        rows += [indent + paint(row, _DIM) for more in line.more for row in self._wrap(more)]
        edge = paint("│" if self._screen.pretty else "|", _COLOURS["bad"][0])
        rows += [f"{' ' * (TIME_WIDTH + 2)}{edge} {_clean(row)}".rstrip() for row in line.quote]
        self._scroll(rows)

    def _printed(self, record: Record) -> None:
        """Show rank 0's output, dimmed; the first time with the place of the whole output."""
        paint, lines = self._screen.paint, record[run_files.PRINTED]
        edge = f"{' ' * (TIME_WIDTH + 2)}{paint('┊' if self._screen.pretty else ':', _DIM)} "
        rows = []
        logs = f"elasticflow logs {self._run_id}"
        if not self._has_printed:
            self._has_printed = True
            label = paint(f"{self._symbols['note']} {'rank 0':<{LABEL_WIDTH}}", _DIM)
            clock = paint(f"{self._now():>{TIME_WIDTH}}", _DIM)
            first, *rest = self._wrap(f"prints; all that workers print: {logs}")
            rows.append(f"{clock}  {label}  {paint(first, _DIM)}")
            rows += [" " * TEXT_COLUMN + paint(row, _DIM) for row in rest]
        if left_out := int_of(record, "left_out"):
            text = f"{plural(left_out, 'line')} left out: {logs} --rank 0"
            rows.append(edge + paint(text, f"{_DIM};3"))
        rows += [
            edge + paint(_clean(str(line.get("text"))), _DIM) for line in lines if isinstance(line, Mapping)
        ]
        self._scroll(rows)

    def _plain(self, clock: str, label: str, text: str) -> None:
        self._scroll([f"{clock:>{TIME_WIDTH}}  {self._symbols['note']} {label:<{LABEL_WIDTH}}  {text}"])

    def _scroll(self, rows: list[str]) -> None:
        self._wrote_at = self._drawn_at = self._clock()
        self._screen.scroll(rows, self._rows())

    def _draw(self) -> None:
        if self._screen.tty and (now := self._clock()) - self._drawn_at >= DRAW_EVERY_S:
            self._drawn_at = now
            self._screen.draw(self._rows())

    def _rows(self) -> list[Row]:
        if not self._screen.tty:
            return []
        now, note = self._wall(), self._symbols["note"]
        clock = self._now().split(".", maxsplit=1)[0]
        return self._board.rows(now, clock, note, self._screen.size, pretty=self._screen.pretty)

    def _progress(self) -> list[str]:
        parts = self._board.progress(share=True)
        if parts and (snapshot := self._history.snapshot) is not None and snapshot.step:
            parts.append(f"snapshot at {snapshot.step}")
        return parts

    def _now(self) -> str:
        seconds = self._narrator.seconds({"time": self._wall()}) if self._run_id else None
        return "" if seconds is None else elapsed(seconds)

    def _wrap(self, text: str) -> list[str]:
        text = _clean(text)
        if not self._screen.tty:
            return [text]
        room = max(30, self._screen.size.columns - TEXT_COLUMN - 1)
        # Paths and commands are copied with the mouse, so they are never broken.
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _clean(text: str) -> str:
    # An error's text may hold terminal codes; they must not move the cursor.
    return "".join(c if c.isprintable() else " " for c in text.expandtabs(4))
