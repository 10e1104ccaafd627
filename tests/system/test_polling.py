"""Asking again for a limited time."""

from __future__ import annotations

import time

from elasticflow.system.polling import attempts


def test_there_is_one_attempt_without_time() -> None:
    """Nobody waits, and the question is asked once all the same."""
    assert 1 == len(list(attempts(0, 60)))


def test_attempts_end_with_the_time() -> None:
    """The last one is after the limit, so that what came to be so meanwhile is seen."""
    began = time.monotonic()
    number = len(list(attempts(0.05, 0.02)))
    assert time.monotonic() - began >= 0.05
    assert 2 <= number <= 4
