"""A run on a person's screen: one line per event that matters, one progress line; no torch.

Not by rich.live, which hides the cursor (a killed supervisor would leave it hidden), ends the process when nobody
reads the pipe any more (the run must go on), and breaks or cuts long words (paths and commands are copied).
"""

from __future__ import annotations

import os
import textwrap
import time
from typing import TYPE_CHECKING, TextIO

from elasticflow import events
from elasticflow.observe.records import Record, int_of
from elasticflow.observe.terminal.colours import speaks_utf8, wants_colour
from elasticflow.observe.terminal.event_lines import Line, Symbol, Tone, epoch_of, rates_of
from elasticflow.observe.terminal.formats import elapsed, number
from elasticflow.observe.terminal.measures import parts_of_speed, parts_of_step
from elasticflow.observe.terminal.narrator import RunNarrator
from elasticflow.observe.terminal.pace import Pace
from elasticflow.system.records import printable_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DRAW_EVERY_S = 0.1
PLAIN_EVERY_S = 10.0

_PRETTY: dict[Symbol, str] = {
    "start": "→",
    "done": "✓",
    "wrong": "✗",
    "again": "↻",
    "stop": "■",
    "note": "·",
    "warning": "!",
}
_ASCII: dict[Symbol, str] = {
    "start": ">",
    "done": "+",
    "wrong": "x",
    "again": "@",
    "stop": "#",
    "note": "-",
    "warning": "!",
}
_COLOURS: dict[Tone, str] = {
    "begin": "36",
    "good": "32",
    "bad": "31",
    "notice": "33",
    "plain": "",
    "quiet": "2",
}
_TEXT_COLOURS: dict[Tone, str] = {
    "begin": "1",
    "good": "1",
    "bad": "1",
    "notice": "",
    "plain": "",
    "quiet": "2",
}
_TIME_WIDTH = 8
_LABEL_WIDTH = 13
_TEXT_COLUMN = _TIME_WIDTH + 2 + 2 + _LABEL_WIDTH + 2
_WIDE = 110


class LiveView:
    """Shows records as they come; never fails: a closed stream makes it silent.

    Args:
        stream: Where to write; not closed.
        tty: The stream is a terminal: progress is one line, redrawn in place.
        colour: Use colours.
        folder: The run folder as it is to be shown at the end.
        clock: Seconds, for throttling only.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        tty: bool,
        colour: bool,
        folder: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream: TextIO | None = stream
        self._tty = tty
        self._colour = colour
        self._clock = clock
        self._narrator = RunNarrator(folder)
        self._pretty = speaks_utf8(stream)
        self._symbols = _PRETTY if self._pretty else _ASCII
        self._drawn_at = clock() if not tty else -DRAW_EVERY_S
        self._progress = ""
        self._pace = Pace()

    @classmethod
    def on(cls, stream: TextIO, environment: Mapping[str, str], folder: str | None = None) -> LiveView:
        """Return a view that suits *stream*: TERM=dumb means no redrawing."""
        tty = stream.isatty() and environment.get("TERM", "dumb") != "dumb"
        # A terminal without TERM is taken for a dumb one.
        colour = wants_colour(stream, {"TERM": "dumb", **environment})
        return cls(stream, tty=tty, colour=colour, folder=folder)

    def show(self, record: Record) -> None:
        """Show one record of either file."""
        is_metric = record.get("event") in {events.STEP, events.EVALUATION} or "event" not in record
        (self.metrics if is_metric else self.event)(record)

    def event(self, record: Record) -> None:
        """Show one record of events.jsonl."""
        line = self._narrator.event(printable_in(dict(record)))
        if line is None:
            return
        if line.symbol in {"wrong", "again", "stop", "start"} or line.tone == "good":
            # What the progress line says is no longer true.
            self._progress = ""
            self._pace.clear()
        self._show(line)
        if record.get("event") == events.RUN_STARTED and self._tty:
            # Importing torch takes seconds in which nothing else happens.
            self._progress = f"{' ' * (_TIME_WIDTH + 2)}{self._symbols['note']} {'starting':<{_LABEL_WIDTH}}"
            self._write(self._progress)

    def metrics(self, record: Record) -> None:
        """Show one record of metrics.jsonl: an evaluation as a line, a step as progress."""
        line = self._narrator.metrics(record)
        if line is not None:
            self._pace.add(record)
            self._show(line)
        elif record.get("loss") is not None:
            self._pace.add(record)
            now = self._clock()
            if now - self._drawn_at >= (DRAW_EVERY_S if self._tty else PLAIN_EVERY_S):
                self._drawn_at = now
                self._draw(record)

    def close(self) -> None:
        """Take the progress line away; the stream stays open."""
        self._progress = ""
        self._write("\r\x1b[K" if self._tty else "")

    def _show(self, line: Line) -> None:
        seconds = "" if line.seconds is None else elapsed(line.seconds)
        clock = self._paint(f"{seconds:>{_TIME_WIDTH}}", "2")
        label = self._paint(f"{self._symbols[line.symbol]} {line.label:<{_LABEL_WIDTH}}", _COLOURS[line.tone])
        indent = " " * _TEXT_COLUMN
        rows = [indent + self._paint(row, _TEXT_COLOURS[line.tone]) for row in self._wrap(line.text)]
        rows[0] = f"{clock}  {label}  {rows[0].removeprefix(indent)}"
        rows += [indent + self._paint(row, "2") for more in line.more for row in self._wrap(more)]
        edge = self._paint("│" if self._pretty else "|", _COLOURS["bad"])
        rows += [f"{' ' * (_TIME_WIDTH + 2)}{edge} {_clean(row)}".rstrip() for row in line.quote]
        clear = "\r\x1b[K" if self._tty else ""
        self._write(clear + "\n".join(rows) + "\n" + self._progress)

    def _wrap(self, text: str) -> list[str]:
        text = _clean(text)
        if not self._tty:
            return [text]
        room = max(30, self._width() - _TEXT_COLUMN - 1)
        # Paths and commands are copied with the mouse, so they are never broken.
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]

    def _draw(self, record: Record) -> None:
        step, steps = int_of(record, "step"), self._narrator.steps
        seconds = self._narrator.seconds(record)
        clock = f"{'' if seconds is None else elapsed(seconds):>{_TIME_WIDTH}}  "
        label = f"{self._symbols['note']} {'training':<{_LABEL_WIDTH}}  "
        count = f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"
        parts = self._parts(record, step, steps)
        if not self._tty:
            share = "" if steps is None else f" ({100 * step // steps} %)"
            self._write(f"{clock}{label}{count}{share}  {'  '.join(parts)}\n")
            return
        bar_width = 0 if steps is None else 20 if self._width() >= _WIDE else 10
        room = self._width() - 1 - _TEXT_COLUMN - len(count) - (bar_width and bar_width + 2)
        row = self._paint(clock, "2") + label + count
        if bar_width and steps is not None:
            row += "  " + self._bar(step / steps, bar_width)
        for part in parts:
            room -= 2 + len(part)
            if room < 0:
                break
            row += "  " + part
        self._progress = row
        self._write("\r\x1b[K" + row)

    def _parts(self, record: Record, step: int, steps: int | None) -> list[str]:
        # What matters most comes first: a narrow terminal leaves out the rest.
        loss = f"loss {number(record.get('loss'))}"
        parts = [loss, *self._speed(step, steps), *parts_of_speed(record), *parts_of_step(record)]
        if (epoch := epoch_of(record)) is not None:
            parts.append(f"epoch {epoch}")
        if rates := rates_of(record):
            parts.append(f"lr {rates}")
        if self._narrator.snapshot:
            parts.append(f"snapshot at {self._narrator.snapshot}")
        return parts

    def _speed(self, step: int, steps: int | None) -> list[str]:
        per_s = self._pace.samples_per_s
        if per_s is None:
            return []
        left = None if steps is None else self._pace.seconds_left(step, steps)
        parts = [] if left is None else [f"{elapsed(left).split('.')[0]} left"]
        return [*parts, f"{per_s:,.0f} samples/s"]

    def _bar(self, share: float, width: int) -> str:
        full = max(0, min(width, round(share * width)))
        done, rest = ("━", "─") if self._pretty else ("=", "-")
        return self._paint(done * full, "36") + self._paint(rest * (width - full), "2")

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns if self._stream else 80
        except (OSError, ValueError):
            return 80

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code and text else text

    def _write(self, text: str) -> None:
        if self._stream is None or not text:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            # The pipe or terminal was closed; the run goes on.
            self._stream = None


def _clean(text: str) -> str:
    # An error's text may hold terminal codes; they must not move the cursor.
    return "".join(c if c.isprintable() else " " for c in text.expandtabs(4))
