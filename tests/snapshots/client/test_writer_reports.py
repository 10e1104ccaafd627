"""A store in trouble is told of at once, then seldom."""

from __future__ import annotations

from elasticflow import events
from elasticflow.snapshots.client import writer_reports
from elasticflow.snapshots.client.writer_reports import ThrottledTroubles
from elasticflow.storage.storage import Trouble


def test_first_trouble_is_told_and_then_one_in_ten_seconds() -> None:
    """Of an outage with hundreds of tries a few events remain, each with the try it is about."""
    told: list[Trouble] = []
    now = 100.0
    take = ThrottledTroubles(told.append, lambda: now)
    for attempt in range(1, 26):
        take(Trouble("read x", "ConnectionError", "ConnectionError: reset", attempt, 0.123))
        now += 1.0
    assert [1, 11, 21] == [trouble.attempt for trouble in told]
    event = writer_reports.as_event(told[0])
    assert {"event", *events.STORE_TROUBLE.fields} == set(event)
    assert (0.1, "ConnectionError") == (event["pause_s"], event["class"])
    assert ("read x", "ConnectionError: reset", 1) == (event["operation"], event["error"], event["attempt"])
