"""What rank 0 prints, as much of it as a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent.printed import RankPrints
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder with the logs of generation 1."""
    made = RunFolder(tmp_path / "runs" / "job" / "run")
    made.generation_logs(1).mkdir(parents=True)
    return made


def _write(folder: RunFolder, stream: str, text: bytes) -> None:
    with folder.rank_log(1, 0, stream).open("ab") as file:
        file.write(text)


def test_lines_come_once_they_are_whole(folder: RunFolder) -> None:
    """Empty lines do not; what is left without an end comes at the end."""
    clock = Clock()
    prints = RankPrints(folder, 1, clock)
    assert ([], 0) == prints.take()
    _write(folder, "stdout", b"hello\n\n  \nwor")
    assert ([("stdout", "hello")], 0) == prints.take()
    _write(folder, "stdout", b"ld")
    assert ([], 0) == prints.take()
    assert ([("stdout", "world")], 0) == prints.end(has_failed=False)


def test_what_a_failing_worker_says_last_is_told_with_its_failure(folder: RunFolder) -> None:
    """A traceback would stand there twice; a warning long before it is shown."""
    clock = Clock()
    prints = RankPrints(folder, 1, clock)
    _write(folder, "stderr", b"UserWarning: beware\n")
    assert ([], 0) == prints.take(), "it may be the beginning of a failure"
    clock.now += 1
    assert ([("stderr", "UserWarning: beware")], 0) == prints.take()
    _write(folder, "stderr", b"Traceback (most recent call last):\n" + b"  frame\n" * 100)
    assert ([], 0) == prints.take()
    _write(folder, "stdout", b"at last\n")
    assert ([("stdout", "at last")], 0) == prints.end(has_failed=True)


def test_flood_is_bounded_and_counted(folder: RunFolder) -> None:
    """The newest lines of it, then one now and then; standard error has room of its own."""
    clock = Clock()
    prints = RankPrints(folder, 1, clock)
    _write(folder, "stdout", b"\n \n".join(b"line %d" % number for number in range(10_000)) + b"\n")
    lines, left_out = prints.take()
    assert [f"line {number}" for number in range(9_992, 10_000)] == [line.text for line in lines]
    assert left_out == 9_992
    _write(folder, "stderr", b"trouble\n")
    shown = total = 0
    for _ in range(80):
        clock.now += 0.125
        _write(folder, "stdout", b"again\n" * 100)
        lines, left_out = prints.take()
        shown += len(lines)
        total += left_out
        assert not left_out or clock.now >= 110
    assert shown == 5 + 1, "one in two seconds, and what was said on standard error"
    lines, left_out = prints.end(has_failed=False)
    assert shown + len(lines) + total + left_out == 8_000 + 1


def test_progress_bar_is_its_last_state(folder: RunFolder) -> None:
    """What it drew over itself is not repeated; colours and codes do nothing to the terminal."""
    prints = RankPrints(folder, 1, Clock())
    _write(folder, "stdout", b"\r 1%|\r50%|\r\x1b[32m100%|\x1b[0m \x1b[2J\r\n")
    assert ([("stdout", "100%| \\x1b[2J")], 0) == prints.take()


def test_long_line_is_cut_and_bytes_of_any_kind_are_text(folder: RunFolder) -> None:
    """Nobody reads a line of a megabyte."""
    prints = RankPrints(folder, 1, Clock())
    _write(folder, "stdout", b"\xff" + b"x" * (1 << 20) + b"\n")
    lines, _ = prints.take()
    assert all(len(line.text) <= 500 for line in lines)
    assert "\N{REPLACEMENT CHARACTER}x" == lines[0].text[:2]


def test_what_was_there_before_can_be_left_out(folder: RunFolder) -> None:
    """Whoever comes later is not told everything again."""
    _write(folder, "stdout", b"old\n")
    prints = RankPrints(folder, 1, Clock(), begins_at_end=True)
    _write(folder, "stdout", b"new\n")
    assert ([("stdout", "new")], 0) == prints.take()
