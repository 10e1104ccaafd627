"""The line that says how much is done."""

from __future__ import annotations

import io
import time

from elasticflow.cli.output import ProgressMeter, bytes_done


class Terminal(io.StringIO):
    """Text that passes for a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def test_progress_in_words() -> None:
    """Bytes, share, rate and what is left; nothing is divided by nothing."""
    assert "50.0 MB of 200.0 MB (25 %), 25.0 MB/s, 6.00 s left" == bytes_done(50_000_000, 200_000_000, 2.0)
    assert "0 bytes of 10 bytes (0 %)" == bytes_done(0, 10, 0.0)
    assert "0 bytes of 0 bytes (100 %)" == bytes_done(0, 0, 1.0)


def test_a_line_that_is_taken_away() -> None:
    """On a terminal it is drawn over itself, at most ten times a second, and gone at the end."""
    out = Terminal()
    with ProgressMeter("verifying", 1000, out=out) as meter:
        meter(1)
        assert "" == out.getvalue()
        while not out.getvalue():
            time.sleep(0.02)
            meter(500)
    assert out.getvalue().startswith("\rverifying  500 bytes of 1.0 kB (50 %)")
    assert out.getvalue().endswith("\r\x1b[K")


def test_nothing_where_nobody_looks() -> None:
    """A log file gets no progress."""
    out = io.StringIO()
    with ProgressMeter("verifying", 1000, out=out) as meter:
        time.sleep(0.15)
        meter(500)
    assert "" == out.getvalue()
