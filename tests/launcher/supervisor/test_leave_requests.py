"""Signals that ask a command to leave."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.supervisor.leave_requests import CancelMark, Hurry, LeaveRequests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HANGUP = signal.SIGHUP


@pytest.fixture
def asked() -> Iterator[LeaveRequests]:
    """Yield what listens for nothing yet; all handlers are given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, HANGUP)}
    yield LeaveRequests()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_closed_terminal_asks_to_leave(asked: LeaveRequests) -> None:
    """Its SIGHUP comes once to us and once to our group."""
    signal.signal(HANGUP, signal.SIG_DFL)
    asked.listen()
    os.kill(os.getpid(), HANGUP)
    os.kill(os.getpid(), HANGUP)

    assert [HANGUP] == asked.numbers


def test_nohup_is_honoured(asked: LeaveRequests) -> None:
    """Whoever starts a run with it wants it to outlive the terminal; SIGTERM asks all the same."""
    signal.signal(HANGUP, signal.SIG_IGN)
    asked.listen()
    os.kill(os.getpid(), HANGUP)
    os.kill(os.getpid(), signal.SIGTERM)

    assert [signal.SIGTERM] == asked.numbers
    assert signal.SIG_IGN == signal.getsignal(HANGUP)


@pytest.mark.parametrize("before", [0, 1])
def test_launch_that_has_its_verdict_is_hurried_by_one_signal_more(
    asked: LeaveRequests, tmp_path: Path, before: int
) -> None:
    """A signal that came while training ended by itself does not cut its last snapshot short; the next signal does."""
    asked.numbers = [signal.SIGINT] * before
    is_hurried = Hurry(asked, CancelMark(tmp_path / "cancel"), before)
    assert not is_hurried()
    asked.numbers.append(signal.SIGINT)
    assert is_hurried()


@pytest.mark.parametrize("heeded", [0, 1, 2])
def test_signal_in_the_moment_of_the_verdict_counts(
    asked: LeaveRequests, tmp_path: Path, heeded: int
) -> None:
    """The supervisor has not looked at it yet; two ask to end at once, whether it has or not."""
    asked.numbers = [signal.SIGINT] * max(2, heeded + 1)
    assert Hurry(asked, CancelMark(tmp_path / "cancel"), heeded)()
    assert Hurry(asked, CancelMark(tmp_path / "cancel"), len(asked.numbers))()


def test_cancel_now_hurries_a_launch_that_has_its_verdict(
    asked: LeaveRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another machine it is all that comes; each wait at the end asks anew."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mark = tmp_path / "cancel"
    mark.write_text("leave\n")
    is_hurried = Hurry(asked, CancelMark(mark), 0)
    assert not is_hurried()
    mark.write_text("now\n")
    now = 10.0
    assert is_hurried()
    assert is_hurried()
