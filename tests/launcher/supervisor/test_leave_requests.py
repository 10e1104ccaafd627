"""Signals that ask a command to leave."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.supervisor.leave_requests import LeaveRequests

if TYPE_CHECKING:
    from collections.abc import Iterator

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
