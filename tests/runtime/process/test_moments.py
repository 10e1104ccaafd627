"""Callbacks by moment, and requests that others decide on."""

from __future__ import annotations

from elasticflow.runtime.process.context import Moments
from elasticflow.runtime.process.votes import Vote


def test_what_waits_for_the_beginning_is_called_once() -> None:
    """By the first loader or after the first step, whichever comes first."""
    called: list[str] = []
    moments = Moments()
    moments.beginning += [lambda: called.append("first"), lambda: called.append("second")]
    moments.begin()
    moments.begin()
    assert called == ["first", "second"]


def test_a_request_is_asked_for_at_each_step() -> None:
    """The last one who wants to say decides; all others are untouched."""
    vote = Vote()
    vote.when("memory", lambda: False)
    vote.when("memory", lambda: True)
    vote.resolve([float(each) for each in vote.requests()])
    assert vote.memory
    assert not any((vote.leave, vote.snapshot, vote.evaluation, vote.buffers, vote.random))
