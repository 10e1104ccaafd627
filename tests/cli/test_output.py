"""The line that says how much is done."""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import ProgressMeter, bytes_done, table, write_file

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Terminal(io.StringIO):
    """Text that passes for a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def test_progress_in_words() -> None:
    """Bytes, share, rate and what is left; nothing is divided by nothing."""
    assert "50.0 MB of 200.0 MB (25 %), 25.0 MB/s, 6.0 s left" == bytes_done(50_000_000, 200_000_000, 2.0)
    assert "0 bytes of 10 bytes (0 %)" == bytes_done(0, 10, 0.0)
    assert "0 bytes of 0 bytes (100 %)" == bytes_done(0, 0, 1.0)


def test_a_line_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is drawn over itself, at most ten times a second, and gone at the end."""
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with ProgressMeter("verifying", 1000, out=out) as meter:
        meter(1)
        assert "" == out.getvalue()
        while "verifying" not in out.getvalue():
            time.sleep(0.02)
            meter(500)
    assert out.getvalue().startswith("\rverifying  500 bytes of 1.0 kB (50 %)")
    assert out.getvalue().endswith("\r\x1b[J"), "the line is gone"
    assert "\x1b[?25l" not in out.getvalue(), "a command that is killed leaves the cursor as it was"


def test_a_table_is_neither_cut_nor_interpreted() -> None:
    """Brackets and colons are text, wide letters take two columns, colours take none, blanks do not trail."""
    rows = [("[red]job[/]", click.style("ok", fg="green"), "x" * 300), ("名前", ":smile:", "")]
    header, first, second = table(("JOB", "STATE", "WHY"), rows)
    assert "JOB          STATE    WHY" == click.unstyle(header)
    assert f"[red]job[/]  \x1b[32mok\x1b[0m       {'x' * 300}" == first
    assert "名前         :smile:" == second


def test_columns_go_where_there_is_no_room() -> None:
    """In the order given, and no more of them than needed; without a width none goes."""
    for width, expected in ((None, "A    B    C"), (11, "A    B    C"), (10, "A    C"), (3, "C")):
        assert expected == click.unstyle(
            next(table("ABC", [["aaa", "bbb", "c"]], width=width, first_to_go="BA"))
        )


def test_nothing_where_nobody_looks() -> None:
    """A log file gets no progress."""
    out = io.StringIO()
    with ProgressMeter("verifying", 1000, out=out) as meter:
        time.sleep(0.15)
        meter(500)
    assert "" == out.getvalue()


def test_a_pipe_and_a_link_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`-o /dev/null`, of a user who may make files in /dev; and a link of the user's own."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "there" / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert 5 == write_file(pipe, "text\n")
        assert (b"text\n", True) == (os.read(reader, 100), pipe.is_fifo())
    finally:
        os.close(reader)
    link.symlink_to(file)
    assert 5 == write_file(link, "text\n")
    assert ("text\n", True) == (file.read_text(), link.is_symlink())
