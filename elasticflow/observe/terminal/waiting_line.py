"""A line about what a command waits for, with the seconds that have passed: drawn in place on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self, TextIO

from elasticflow.observe.terminal.activities import whole_seconds
from elasticflow.observe.terminal.colours import can_redraw, wants_colour
from elasticflow.observe.terminal.screen import Part, Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What ends before is not told; a stream that is no terminal gets its first line later, and then ever more rarely.
_QUIET_S, _PLAIN_S, _PLAIN_MOST_S = 1.0, 10.0, 60.0


class WaitingLine:
    """One line about one thing at a time; taken away at the end.

    Args:
        stream: Where to write; not closed.
        environment: Whether it is a terminal that can be drawn on, and colours are wanted.
        clock: Seconds.
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
        """Say what is waited for now, if it lasts; to be called several times a second, with the same words while it does.

        Args:
            label: For what it is done.
            what: In words that a number of seconds can follow.
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
