"""Waiting for a limited time: for descriptors, or by asking again until something is so."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def readable(descriptors: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Return the *descriptors* that can be read or are at their end, once there is one, or after *timeout_s* (None: no limit).

    Not by `select.select`, which takes no descriptor above 1023: the job's code may have thousands of files open.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


def attempts(limit_s: float, pause_s: float) -> Iterator[None]:
    """Yield for each attempt at something: at once, then every *pause_s* seconds, the last one after *limit_s*."""
    deadline = time.monotonic() + limit_s
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        yield
