"""A line on the terminal that says how much of a long piece of work is done."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self, TextIO

from elasticflow.observe.terminal.formats import size, span

if TYPE_CHECKING:
    from types import TracebackType

_EVERY_S = 0.1


class Meter:
    """Shows bytes done, share and rate on one line of the terminal, and takes the line away at the end.

    Where nobody looks (no terminal) nothing is written.

    Args:
        label: What is done.
        total: Bytes of all of it.
        out: Where; default: standard error.
    """

    def __init__(self, label: str, total: int, out: TextIO | None = None) -> None:
        self._label, self._total = label, total
        self._out = out or sys.stderr
        self._began = time.monotonic()
        self._next = self._began + _EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def __call__(self, done: int) -> None:
        """Say that *done* bytes are through; drawn ten times a second at most."""
        now = time.monotonic()
        if now < self._next or not self._out.isatty():
            return
        self._next = now + _EVERY_S
        self._out.write(f"\r{self._label}  {progress(done, self._total, now - self._began)}\x1b[K")
        self._out.flush()


def progress(done: int, total: int, seconds: float) -> str:
    """Return `1.2 GB of 2.4 GB (50 %), 480.0 MB/s, 2.50 s left`."""
    share = 100 * done // total if total else 100
    text = f"{size(done)} of {size(total)} ({share} %)"
    if seconds <= 0 or not done:
        return text
    left = (total - done) * seconds / done
    return f"{text}, {size(done / seconds)}/s, {span(left)} left"
