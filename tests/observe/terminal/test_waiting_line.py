"""What a command waits for, on a terminal and elsewhere."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.screen import WaitingLine

if TYPE_CHECKING:
    import pytest


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        """It is one."""
        return True


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


def _wait(stream: io.StringIO, environment: dict[str, str]) -> None:
    clock = _Clock()
    with WaitingLine(stream, environment, clock) as waiting:
        for second in range(100):
            waiting.tell("trying out a.toml", "importing torch" if second < 5 else "building the model")
            clock.now += 1


def test_seconds_tick_on_a_terminal_and_are_taken_away() -> None:
    """What ends at once shows no line."""
    stream = _Terminal()
    _wait(stream, {"TERM": "xterm", "NO_COLOR": "1"})
    drawn = stream.getvalue().split("\x1b[J\r")
    assert "\rtrying out a.toml: importing torch, 1 s" == drawn[0]
    assert "trying out a.toml: building the model, 0 s" in drawn
    assert ["trying out a.toml: building the model, 1 min 34 s", "\x1b[J"] == drawn[-2:]


def test_file_gets_a_line_ever_more_rarely() -> None:
    """A check of seconds says nothing there."""
    stream = io.StringIO()
    _wait(stream, {})
    assert stream.getvalue().splitlines() == [
        "trying out a.toml: building the model, 5 s",
        "trying out a.toml: building the model, 25 s",
        "trying out a.toml: building the model, 1 min 5 s",
    ]


def test_another_job_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """The time of the one before is not its own."""
    stream, clock = io.StringIO(), _Clock()
    with WaitingLine(stream, {}, clock) as waiting:
        for label in ("a", "b"):
            for _ in range(9):
                waiting.tell(label, "x")
                clock.now += 1
    assert "" == stream.getvalue()
    assert "" == capsys.readouterr().out
