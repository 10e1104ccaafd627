"""A store in trouble is told of at once, then seldom."""

from __future__ import annotations

from typing import Any

from elasticflow import events
from elasticflow.snapshots.writer.reports import ThrottledTroubles
from elasticflow.storage.storage import Trouble


def test_first_trouble_is_told_and_then_one_in_ten_seconds() -> None:
    """Of an outage with hundreds of tries a few events remain, each with the try it is about."""
    told: list[dict[str, Any]] = []
    now = 100.0
    take = ThrottledTroubles(told.append, lambda: now)
    for attempt in range(1, 26):
        take(Trouble("read x", "ConnectionError", "ConnectionError: reset", attempt, 0.123))
        now += 1.0
    assert [1, 11, 21] == [report["attempt"] for report in told]
    assert {"event", *events.STORE_TROUBLE.fields} == set(told[0])
    assert (0.1, "ConnectionError") == (told[0]["pause_s"], told[0]["class"])
