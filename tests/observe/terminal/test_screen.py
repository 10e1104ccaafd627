"""Rows that are drawn in place, on terminals of any size, and on none."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.screen import Part, Screen

if TYPE_CHECKING:
    import pytest


def _screen(encoding: str = "utf-8", *, tty: bool = True) -> tuple[Screen, io.BytesIO]:
    raw = io.BytesIO()
    return Screen(io.TextIOWrapper(raw, encoding=encoding), tty=tty, colour=True), raw


def _said(raw: io.BytesIO) -> str:
    text = raw.getvalue().decode()
    raw.seek(0)
    raw.truncate()
    return text


def test_rows_are_drawn_over_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up by as many lines as they take, also once a terminal that got narrower has wrapped them."""
    screen, raw = _screen()
    monkeypatch.setattr(Screen, "size", os.terminal_size((80, 24)))
    rows = [[Part("x" * 79)], [Part("y" * 30, "2")]]
    screen.draw(rows)
    assert _said(raw) == "\r" + "x" * 79 + "\x1b[K\n\x1b[2m" + "y" * 30 + "\x1b[0m\x1b[J"
    screen.draw(rows)
    assert _said(raw) == "", "they stand there"

    monkeypatch.setattr(Screen, "size", os.terminal_size((20, 24)))
    screen.draw(rows)
    said = _said(raw)
    assert said.startswith("\r\x1b[5A"), "4 lines and 2 lines, the cursor in the last"
    assert said == "\r\x1b[5A" + "x" * 19 + "\x1b[K\n\x1b[2m" + "y" * 19 + "\x1b[0m\x1b[J"
    screen.scroll(["told"], rows[1:])
    assert _said(raw) == "\r\x1b[1Atold\x1b[K\n\x1b[2m" + "y" * 19 + "\x1b[0m\x1b[J"
    screen.close()
    assert _said(raw) == "\r\x1b[J"


def test_wide_letters_are_not_cut_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row ends before the last column, which a letter of two columns must not cross."""
    screen, raw = _screen()
    monkeypatch.setattr(Screen, "size", os.terminal_size((8, 24)))
    screen.draw([[Part("ab\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 3)]])
    assert _said(raw) == "\rab\N{CJK UNIFIED IDEOGRAPH-4E2D}ab\x1b[J"


def test_stream_that_is_no_terminal_gets_lines_alone() -> None:
    """Nothing is drawn in place, and nothing is cleared."""
    screen, raw = _screen(tty=False)
    screen.draw([[Part("x")]])
    screen.scroll(["told"], [[Part("x")]])
    screen.close()
    assert _said(raw) == "told\n"


def test_text_that_the_stream_cannot_express_is_replaced() -> None:
    """An old locale is no reason to be silent."""
    screen, raw = _screen("latin-1", tty=False)
    screen.scroll(["größe \N{CJK UNIFIED IDEOGRAPH-4E2D}"])
    assert raw.getvalue() == "größe ?\n".encode("latin-1")
    assert not screen.pretty


def test_terminal_that_went_away_ends_nothing() -> None:
    """Its user has closed the window: the run continues in silence."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        screen = Screen(stream, tty=True, colour=False)
        screen.draw([[Part("x")]])
        os.close(ours)
        for _ in range(3):
            screen.scroll(["told"], [[Part("y")]])
        assert 80 == screen.size.columns
        screen.close()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, theirs)  # so that closing can flush what the terminal did not take
        os.close(null)
