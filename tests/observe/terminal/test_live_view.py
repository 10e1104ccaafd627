from __future__ import annotations

import io
import os
import pty
import re
from typing import Any

import pytest

from elasticflow.observe.terminal.live_view import LiveView
from tests.observe.hand_made import event, step, story_of_a_kill

COLOUR = re.compile(r"\x1b\[\d*m")


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


def shown(
    records: list[dict[str, Any]], *, tty: bool, colour: bool, encoding: str = "utf-8", pause: float = 1.0
) -> str:
    """Return what a console writes for *records*, *pause* seconds apart."""
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    view = LiveView(stream, tty=tty, colour=colour, folder="runs/mnist/x", clock=clock)
    for record in records:
        clock.now += pause
        view.show(record)
    view.close()
    return raw.getvalue().decode(encoding)


def test_a_file_gets_one_plain_aligned_line_per_event() -> None:
    """Without a terminal there are no control codes, and every text starts in the same column."""
    text = shown(story_of_a_kill(), tty=False, colour=False, pause=0.1)
    assert text == PLAIN


PLAIN = """\
  0:00.0  → run            mnist 20261120-100000-4f2a, torch 2.13.0
  0:00.2  → workers        2 workers on 1 node
  0:02.3  · data           train: 1,437 samples of examples/mnist, fingerprint 4be1a09c
  0:02.4  → training       from the beginning, 60 steps on cpu, 23,466 parameters
  0:03.5  ✓ evaluation     epoch 1, step 20: accuracy 0.9000, loss 0.1000 (best)
  0:03.6  ✓ snapshot       step 20, 291.2 kB in 4 ms
  0:05.0  ✗ worker killed  rank 1 (pid 4711) by SIGKILL, after step 47
                           1 other rank: connection closed by peer
  0:05.1  ↻ restart        2 workers on 1 node, generation 2; 4 restarts left
  0:05.2  ↻ restored       from the snapshot of step 40, 7 steps to do again
  0:05.3  ✓ going on       step 41 done 0.27 s after the failure
  0:06.4  ✓ evaluation     epoch 3, step 60: accuracy 0.9800, loss 0.1000
  0:06.4  ✓ snapshot       step 60, 291.2 kB in 4 ms
  0:06.6  ✓ finished       accuracy 0.9800, loss 0.1000 (best 0.9850), 60 steps, 1 restart
                           took 6.6 s: starting 2.4 s, training 3.3 s, evaluating 0.5 s, restarting 0.2 s, ending 0.2 s
                           runs/mnist/x
"""


def test_a_file_gets_a_progress_line_every_ten_seconds() -> None:
    """Steps are many; a log file sees one of them per ten seconds, with speed and time left."""
    start = [event(0, "run.started"), event(0, "training.started", step=0, steps=100)]
    text = shown([*start, *[step(n, n) | {"seconds": 1.0} for n in range(1, 31)]], tty=False, colour=False)
    progress = [line for line in text.splitlines() if "step " in line]
    assert progress == [
        "  0:08.0  · training       step   8/100 (8 %)  loss 0.2500  1:32 left  64 samples/s  epoch 1  lr 3.0e-03",
        "  0:18.0  · training       step  18/100 (18 %)  loss 0.1111  1:22 left  64 samples/s  epoch 1  lr 3.0e-03",
        "  0:28.0  · training       step  28/100 (28 %)  loss 0.0714  1:12 left  64 samples/s  epoch 2  lr 3.0e-03",
    ]


def test_a_terminal_gets_one_progress_line_redrawn_in_place() -> None:
    """Progress overwrites itself, events push it down, and at the end it is gone."""
    start = [event(0, "run.started"), event(0, "training.started", step=0, steps=100)]
    records = [*start, step(1, 1), step(2, 2), event(2, "loss.skipped", step=3, loss="nan"), step(4, 4)]
    text = shown(records, tty=True, colour=False)
    assert text.count("\n") == 3, "only events end a line"
    assert text.endswith("\r\x1b[K")
    after_event = text[text.index("skipped") :].split("\n")[1]
    assert "step   2/100" in after_event, "the progress line stays below the event"


def test_a_failure_takes_stale_progress_away() -> None:
    """After a worker died, the last speed and loss are not shown as if training went on."""
    start = [event(0, "run.started"), event(0, "training.started", step=0, steps=100)]
    text = shown(
        [*start, step(1, 1), event(2, "worker.failed", rank=0, error="exit code 3")], tty=True, colour=False
    )
    assert text.endswith("rank 0: exit code 3, after step 1\n\r\x1b[K")


def test_colours_only_add_colours() -> None:
    """The coloured text without its codes is the plain text."""
    plain = shown(story_of_a_kill(), tty=False, colour=False, pause=0.1)
    coloured = shown(story_of_a_kill(), tty=False, colour=True, pause=0.1)
    assert "\x1b[31m" in coloured
    assert COLOUR.sub("", coloured) == plain


def test_an_old_terminal_gets_ascii() -> None:
    """Symbols follow the stream's encoding, and text it cannot express is replaced, never an error."""
    failed = event(
        1, "worker.failed", rank=0, error="ValueError: größer", traceback="Traceback\nValueError: größer"
    )
    text = shown([event(0, "run.started"), failed], tty=False, colour=False, encoding="ascii")
    assert text.isascii()
    assert "x worker failed  rank 0: ValueError: gr??er" in text
    assert "          | ValueError: gr??er" in text


def test_control_codes_in_an_error_do_not_reach_the_terminal() -> None:
    """An exception's text cannot move the cursor or clear the screen."""
    failed = event(1, "worker.failed", rank=0, error="E: \x1b[2J\a\r!", traceback="Traceback\n\x1b[2JE")
    text = shown([failed], tty=False, colour=False)
    assert "\x1b" not in text
    assert "\a" not in text


def test_a_closed_stream_makes_the_console_silent() -> None:
    """`elasticflow run | head` must not end the run."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8", closefd=False) as stream:
        view = LiveView(stream, tty=False, colour=False)
        for record in story_of_a_kill():
            view.show(record)
        view.close()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, write)  # so that closing can flush what the pipe did not take
        os.close(null)
    os.close(write)


@pytest.mark.parametrize(
    ("environment", "tty", "colour"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, True),
    ],
)
def test_what_suits_a_terminal(environment: dict[str, str], *, tty: bool, colour: bool) -> None:
    """TERM=dumb means no redrawing, NO_COLOR no colours, FORCE_COLOR colours anyway."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor has no path
        view = LiveView.on(stream, environment)
        view.show(event(0, "run.started"))
        view.show(step(1, 1))
        view.close()
        text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ("\x1b[K" in text) == tty
    assert (COLOUR.search(text) is not None) == colour


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_progress_fits_any_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The progress line is never wider than the terminal: a wrapped line could not be redrawn."""
    monkeypatch.setattr(LiveView, "_width", lambda _: width)
    start = [event(0, "run.started"), event(0, "training.started", step=0, steps=100)]
    text = shown([*start, *[step(n, n) for n in range(1, 31)]], tty=True, colour=False)
    drawn = [part.split("\n")[0] for part in text.split("\r\x1b[K")]
    assert max(map(len, drawn)) < max(width, 60)
    assert any("loss" in part for part in drawn) == (width >= 80)
