"""A line about a command's present wait, with the elapsed seconds: redrawn on a terminal, written now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self, TextIO

from elasticflow.observe.terminal.activities import whole_seconds
from elasticflow.observe.terminal.colours import can_redraw, wants_colour
from elasticflow.observe.terminal.screen import Part, Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Shorter waits get no line; a stream that is no terminal gets its first line later, and further lines at growing
# intervals.
_QUIET_S, _PLAIN_S, _PLAIN_MOST_S = 1.0, 10.0, 60.0


class WaitingLine:
    """A line about one activity at a time; it is removed at the end.

    Args:
        stream: Stream to write to; it is not closed.
        environment: Environment variables, for TERM and the choice of colours.
        clock: Returns seconds.
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
            label: Purpose of the wait.
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
