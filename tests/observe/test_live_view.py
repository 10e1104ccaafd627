from __future__ import annotations

import io
import os
import pty
import re
import textwrap
from typing import Any

import pytest
from rich.cells import cell_len

from elasticflow.observe.live_view import LiveView
from elasticflow.observe.run_board import TEXT_COLUMN
from elasticflow.observe.terminal.screen import Screen
from elasticflow.protocol.messages import PrintedLine
from elasticflow.protocol.run_files import known_record, printed_record
from tests.guide.kill_transcript import Screen as Terminal
from tests.observe.hand_made import START, event, step, story_of_a_kill

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
    """Return what a console writes for *records*, *pause* seconds apart; for `{}` it is told that time passes."""
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    view = LiveView(
        stream,
        tty=tty,
        colour=colour,
        folder="runs/mnist/x",
        clock=clock,
        wall=lambda: START + clock.now,
    )
    for record in records:
        clock.now += pause
        if record:
            view.show(record)
        else:
            view.tick()
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
  0:05.3  ✓ resuming       step 41 done 0.27 s after the failure
  0:06.4  ✓ evaluation     epoch 3, step 60: accuracy 0.9800, loss 0.1000
  0:06.4  ✓ snapshot       step 60, 291.2 kB in 4 ms
  0:06.6  ✓ finished       accuracy 0.9800, loss 0.1000 (best 0.9850), 60 steps, 1 restart
                           took 6.6 s: starting 2.4 s, training 3.3 s, evaluating 0.51 s, restarting 0.20 s, ending 0.15 s
                           runs/mnist/x
"""


BEGIN = [
    event(0, "run.started"),
    event(0, "training.started", step=0, steps=100),
    event(0, "training.first_step"),
]


def test_a_file_gets_a_progress_line_every_ten_seconds() -> None:
    """Steps are many; a log file sees one of them per ten seconds, with speed and time left."""
    text = shown([*BEGIN, *[step(n, n) | {"seconds": 1.0} for n in range(1, 31)]], tty=False, colour=False)
    progress = [line for line in text.splitlines() if "step " in line]
    assert progress == [
        "  0:07.0  · training       step   7/100 (7 %)  loss 0.2857  1:33 left  64 samples/s  epoch 1  lr 3.0e-03",
        "  0:17.0  · training       step  17/100 (17 %)  loss 0.1176  1:23 left  64 samples/s  epoch 1  lr 3.0e-03",
        "  0:27.0  · training       step  27/100 (27 %)  loss 0.0741  1:13 left  64 samples/s  epoch 2  lr 3.0e-03",
    ]


def test_a_file_is_told_what_lasts_ever_more_rarely() -> None:
    """A start of minutes is not silent, and does not fill a log; something else begins anew."""
    at = {"phase": "import", "subject": "datasets", "step": 0, "since": START + 95}
    passing: list[dict[str, Any]] = [{}]
    known = known_record({"activities": {"n0": at}})
    text = shown([event(0, "run.started"), *passing * 94, known, *passing * 200], tty=False, colour=False)
    assert text.splitlines()[1:] == [
        "  0:11.0  · starting       importing torch, 11 s",
        "  0:31.0  · starting       importing torch, 31 s",
        "  1:11.0  · starting       importing torch, 1 min 11 s",
        "  1:37.0  · starting       importing datasets, 2 s",
        "  1:57.0  · starting       importing datasets, 22 s",
        "  2:37.0  · starting       importing datasets, 1 min 2 s",
        "  3:37.0  · starting       importing datasets, 2 min 2 s",
        "  4:37.0  · starting       importing datasets, 3 min 2 s",
    ]


def test_first_seconds_tick_on_a_terminal() -> None:
    """What it is at, and for how long, on one line; nothing is written while nothing has changed."""
    at = {"phase": "import", "subject": "datasets", "step": 0, "since": START + 3}
    records = [event(0, "run.started"), {}, {}, known_record({"activities": {"n0": at}}), {}, {}]
    text = shown(records, tty=True, colour=False)
    drawn = [part for part in re.split(r"[\r\n]|\x1b\[[KJ]", text) if "· starting" in part]
    assert drawn == [
        "    0:01  · starting       importing torch, 1 s",
        "    0:02  · starting       importing torch, 2 s",
        "    0:03  · starting       importing torch, 3 s",
        "    0:04  · starting       importing datasets, 1 s",
        "    0:05  · starting       importing datasets, 2 s",
        "    0:06  · starting       importing datasets, 3 s",
    ]
    assert text.count("\n") == 1
    again = shown([event(0, "run.started"), *[{}] * 8], tty=True, colour=False, pause=0.125)
    assert again.count("importing torch") == 2


def test_terminal_ends_with_the_lines_that_a_file_gets() -> None:
    """Nothing that was drawn in place is left between them, and none of them is drawn over."""
    printed = printed_record([PrintedLine("stdout", "hello")], 3)
    known = known_record({"epochs": 3, "budget_left": 4, "activities": {}})
    story = [each for record in story_of_a_kill() for each in (record, {}, known)]
    story.insert(60, printed)
    screen = Terminal()
    drawn = shown(story, tty=True, colour=True, pause=0.04)
    screen.feed(drawn.replace("\n", "\r\n"))  # as a terminal has it
    lines = ["".join(cell.character for cell in line).rstrip() for line in screen.lines]
    plain = shown([each for each in story if each], tty=False, colour=False, pause=0.06).splitlines()
    expected = [row for line in plain if "· training       step" not in line for row in _wrapped(line)]
    clocks = re.compile(r"^ *\d:\d\d\.\d")  # of what is shown when nothing says when it was
    assert [clocks.sub("", line) for line in lines if line] == [clocks.sub("", line) for line in expected]


def _wrapped(line: str) -> list[str]:
    head, text = line[:TEXT_COLUMN], line[TEXT_COLUMN:]
    if len(line) < 80 or "┊" in line:
        return [line]
    rows = textwrap.wrap(text, 80 - TEXT_COLUMN - 1, break_long_words=False, break_on_hyphens=False)
    return [head + rows[0], *(" " * TEXT_COLUMN + row for row in rows[1:])]


def test_progress_is_drawn_over_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events push it up, and at the end it is gone."""
    monkeypatch.setattr(Screen, "size", os.terminal_size((150, 24)))
    records = [*BEGIN, step(4, 1), step(5, 2), event(6, "loss.skipped", step=3, loss="nan"), step(7, 4)]
    text = shown(records, tty=True, colour=False)
    told = text[: text.index("loss nan")]
    assert told.count("\n") == 2, "only events end a line"
    assert text.endswith("\r\x1b[J")
    after_event = text[text.index("skipped") :].split("\n")[1]
    assert "step   2/100" in after_event, "the progress stays below the event"


def test_a_failure_takes_stale_progress_away() -> None:
    """After a worker died, the last speed and loss are not shown as if training continued."""
    text = shown(
        [*BEGIN, step(4, 1), event(5, "worker.failed", rank=0, error="exit code 3")], tty=True, colour=False
    )
    assert text.endswith(
        "rank 0: exit code 3, after step 1\x1b[K\n"
        "    0:05  · restarting     the next group is formed, 0 s\x1b[J\r\x1b[J"
    )


def test_what_rank_0_prints_stands_among_the_lines() -> None:
    """Dimmed, the first time with where all of it is; what was left out is counted."""
    lines = [PrintedLine("stdout", "hello \x1b[2J"), PrintedLine("stderr", "beware")]
    records = [event(0, "run.started"), printed_record(lines, 0), printed_record(lines[1:], 1204)]
    text = shown(records, tty=False, colour=False, pause=0.0)
    run_id = event(0, "x")["run_id"]
    assert text.splitlines()[1:] == [
        f"  0:00.0  · rank 0         prints; all that workers print: elasticflow logs {run_id}",
        "          ┊ hello  [2J",
        "          ┊ beware",
        f"          ┊ 1,204 lines left out: elasticflow logs {run_id} --rank 0",
        "          ┊ beware",
    ]
    assert "\x1b[2mbeware\x1b[0m" in shown(records, tty=False, colour=True)


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
    assert ("\x1b[J" in text) == tty
    assert (COLOUR.search(text) is not None) == colour


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("height", [2, 5, 24])
def test_what_is_drawn_fits_any_terminal(monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> None:
    """A row that wraps could not be drawn over, nor could one that has scrolled away."""
    monkeypatch.setattr(Screen, "size", os.terminal_size((width, height)))
    nodes = [
        event(0, "node.joined", node=f"n{i}", host="größe\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 9, nproc=2)
        for i in range(9)
    ]
    group = event(0, "generation.started", world_size=18, nodes=9, members=[f"n{i}" for i in range(9)])
    committed = event(3, "snapshot.committed", step=1, bytes=10**9, trigger="steps", name="s")
    known = known_record({"epochs": 5, "budget_left": 3, "activities": {}})
    clock = Clock()
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    view = LiveView(stream, tty=True, colour=False, clock=clock, wall=lambda: START + clock.now)
    for record in [*nodes, group, *BEGIN, committed, known, *[step(n, n) for n in range(1, 31)]]:
        clock.now += 1
        view.show(record)
    rows = view._screen._text.split("\x1b[K\n")
    assert len(rows) <= max(1, height - 2)
    assert all(cell_len(row) < width for row in rows)
    assert any("step  30/100" in row for row in rows) == (width >= 40)
    assert any("epoch 2/5" in row for row in rows) == (width >= 120 or (width >= 80 and height > 3))
    assert any("3 restarts left" in row for row in rows) == (width >= 80 and height > 3)
