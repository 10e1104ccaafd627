"""A person's screen: lines that scroll and, on a terminal, a few rows below them that are redrawn in place.

rich.live does not suit: it hides the cursor (a killed supervisor would leave it hidden), ends the process when the pipe
has lost its reader (the run must continue), breaks or cuts long words (paths and commands are copied), and leaves
pieces of rows behind once a narrower terminal has wrapped them.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple, Self, TextIO

from elasticflow.observe.terminal.activities import whole_seconds
from elasticflow.observe.terminal.colours import can_redraw, speaks_utf8, wants_colour

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_USUAL = os.terminal_size((80, 24))
# Shorter waits get no line; a stream that is no terminal gets its first line later, and further lines at growing
# intervals.
_QUIET_S, _PLAIN_S, _PLAIN_MOST_S = 1.0, 10.0, 60.0


class Part(NamedTuple):
    """A piece of a row: its text, and the terminal's code of its colour."""

    text: str
    colour: str = ""


Row = list[Part]
"""A row from left to right, which is cut at the edge of the terminal."""


class Screen:
    """Writes to *stream* without closing it; never fails: if the stream is closed, the screen is silent.

    Attributes:
        tty: As in the arguments.
        pretty: True if the stream takes signs beyond ASCII.
    """

    def __init__(self, stream: TextIO, *, tty: bool, colour: bool) -> None:
        self._stream: TextIO | None = stream
        self._colour = colour
        self.tty, self.pretty = tty, speaks_utf8(stream)
        self._drawn: list[int] = []  # cells of each row that is drawn
        self._text = ""

    @property
    def size(self) -> os.terminal_size:
        """The present number of columns and lines."""
        try:
            size = _USUAL if self._stream is None else os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return _USUAL
        return size if size.columns and size.lines else _USUAL  # a terminal that does not know its size has 0

    def paint(self, text: str, colour: str) -> str:
        """Return *text* in a colour, if colours are used."""
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and colour and text else text

    def scroll(self, rows: Sequence[str], below: Sequence[Row] = ()) -> None:
        """Write *rows*, which are painted already, and draw *below* in place under them."""
        self._write(self._start() + "".join(f"{row}{self._end}\n" for row in rows) + self._draw(below))

    def draw(self, rows: Sequence[Row]) -> None:
        """Draw *rows* in place; nothing is written if they are drawn already, or the stream is no terminal."""
        if not self.tty:
            return
        begin, before = self._start(), self._text
        text = self._draw(rows)
        if self._text != before:
            self._write(begin + text)

    def close(self) -> None:
        """Remove the rows that are drawn in place."""
        if self.tty:
            self.scroll(())

    @property
    def _end(self) -> str:
        return "\x1b[K" if self._drawn else ""

    def _start(self) -> str:
        """Return the code that moves the cursor to the first drawn row; a narrower terminal has wrapped the rows."""
        if not self.tty:
            return ""
        columns = self.size.columns
        lines = sum(max(1, math.ceil(cells / columns)) for cells in self._drawn)
        return "\r" + (f"\x1b[{lines - 1}A" if lines > 1 else "")

    def _draw(self, rows: Sequence[Row]) -> str:
        if not self.tty:
            return ""
        size = self.size
        # A row as wide as the terminal would wrap, and could then not be overwritten.
        cut = [_cut(row, size.columns - 1) for row in rows[: max(1, size.lines - 2)]]
        self._drawn = [sum(_cells(part.text) for part in row) for row in cut]
        self._text = "\x1b[K\n".join("".join(self.paint(*part) for part in row) for row in cut)
        return self._text + "\x1b[J"

    def _write(self, text: str) -> None:
        if self._stream is None or not text:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            # The pipe or terminal was closed; the run continues.
            self._stream = None


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _cut(row: Row, columns: int) -> Row:
    kept: Row = []
    for part in row:
        cells = _cells(part.text)
        if cells > columns:
            text = part.text[:columns]
            while _cells(text) > columns:
                text = text[:-1]
            return [*kept, part._replace(text=text)]
        kept.append(part)
        columns -= cells
    return kept


class WaitingLine:
    """A line about one activity at a time; it is removed at the end.

    Args:
        stream: Stream to write to; it is not closed.
        environment: Environment variables, for TERM and the choice of colours.
    """

    def __init__(
        self, stream: TextIO, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = Screen(
            stream, tty=can_redraw(stream, environment), colour=wants_colour(stream, environment)
        )
        self._clock = clock
        self._label, self._what = "", ""
        self._began = self._since = clock()
        self._told_s, self._pause_s = 0.0, _PLAIN_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._screen.close()

    def tell(self, label: str, what: str) -> None:
        """Show the present wait, if it lasts; to be called several times a second, with equal words for the same wait.

        Args:
            what: The wait in words that a number of seconds can follow.
        """
        now = self._clock()
        if label != self._label:
            self._began, self._told_s, self._pause_s = now, 0.0, _PLAIN_S
        if (label, what) != (self._label, self._what):
            self._label, self._what, self._since = label, what, now
        lasted = now - self._began
        words = f"{what}, {whole_seconds(now - self._since)}"
        if self._screen.tty and lasted >= _QUIET_S:
            self._screen.draw([[Part(f"{label}: ", "2"), Part(words)]])
        elif not self._screen.tty and lasted >= self._told_s + self._pause_s:
            self._told_s, self._pause_s = lasted, min(_PLAIN_MOST_S, 2 * self._pause_s)
            self._screen.scroll([f"{label}: {words}"])
