"""Showing what happens without waiting for whoever looks at it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from elasticflow.launcher.journal import display_thread
from elasticflow.launcher.journal.display_thread import DisplayThread

if TYPE_CHECKING:
    import pytest


def test_all_is_shown_in_order() -> None:
    """Nothing is left when it is closed."""
    seen: list[dict[str, Any]] = []
    show = DisplayThread(seen.append)
    for step in range(100):
        show({"step": step})

    assert show.close()
    assert list(range(100)) == [record["step"] for record in seen]


def test_terminal_that_is_held_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch continues, its records do not pile up without end, and its end comes."""
    monkeypatch.setattr(display_thread, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(display_thread, "_MOST_WAITING", 10)
    begun, released = threading.Event(), threading.Event()
    seen: list[dict[str, Any]] = []

    def held(record: dict[str, Any]) -> None:
        begun.set()
        released.wait()
        seen.append(record)

    show = DisplayThread(held)
    show({"step": 0})
    assert begun.wait(60)
    for step in range(1, 100):
        show({"step": step})
    assert not show.close()

    released.set()
    show._thread.join(60)
    assert list(range(11)) == [record["step"] for record in seen]


def test_clock_is_shown_while_nothing_happens_and_while_much_does() -> None:
    """The first seconds tick; records that come without a pause do not keep them from it."""
    ticked, seen = threading.Event(), threading.Event()
    show = DisplayThread(lambda _: seen.set(), ticked.set)
    assert ticked.wait(60)
    ticked.clear()
    while not ticked.is_set():
        show({})
    assert seen.is_set()
    assert show.close()


def test_a_record_that_cannot_be_shown_does_not_end_the_display(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told once, with the place; the records after it are shown."""
    seen: list[dict[str, Any]] = []

    def show(record: dict[str, Any]) -> None:
        if record["step"] < 2:
            raise IndexError("an evaluation that measured nothing")
        seen.append(record)

    display = DisplayThread(show)
    for step in range(4):
        display({"step": step})
    assert display.close()
    assert [2, 3] == [record["step"] for record in seen]
    told = capsys.readouterr().err
    assert told.count("cannot be shown here") == 1
    assert "IndexError: an evaluation that measured nothing" in told
