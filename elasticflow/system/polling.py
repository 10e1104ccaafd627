"""Asking again until something is so, for a limited time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def attempts(limit_s: float, pause_s: float) -> Iterator[None]:
    """Yield for each attempt at something: at once, then every *pause_s* seconds, the last one after *limit_s*."""
    deadline = time.monotonic() + limit_s
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        yield
