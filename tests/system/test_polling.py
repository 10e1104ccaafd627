"""Asking again for a limited time."""

from __future__ import annotations

import fcntl
import os
import resource
import time

from elasticflow.system.polling import attempts, readable


def test_there_is_one_attempt_without_time() -> None:
    """Nobody waits, and the question is asked once all the same."""
    assert 1 == len(list(attempts(0, 60)))


def test_attempts_end_with_the_time() -> None:
    """The last one is after the limit, so that what came to be so meanwhile is seen."""
    began = time.monotonic()
    number = len(list(attempts(0.05, 0.02)))
    assert time.monotonic() - began >= 0.05
    assert 2 <= number <= 4


def test_a_descriptor_may_have_any_number() -> None:
    """A pipe that has nothing to read, has something, and is at its end; `select.select` refuses numbers above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    reads, writes = os.pipe()
    high = fcntl.fcntl(reads, fcntl.F_DUPFD_CLOEXEC, 1100)
    try:
        assert set() == readable([high], 0)
        os.write(writes, b"a")
        assert {high} == readable([high])
        assert b"a" == os.read(high, 2)
        os.close(writes)
        assert {high} == readable([high])
    finally:
        os.close(reads)
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
