from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.history import RunHistory
from elasticflow.observe.narrator import RunNarrator
from elasticflow.sinks import main
from elasticflow.sinks.delivery import Delivery
from tests.sinks.runs import Collecting, Remote, Written, event_line

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_is_waited_for_at_the_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sink that has everything nothing is said; of the other how much, and how long."""
    monkeypatch.setattr(main, "UNTOLD_S", 0.0)
    written, told = Written.under(tmp_path), []
    written.events(event_line(events.RUN_STARTED), event_line(events.RUN_FINISHED))

    def report(event: str, /, **fields: Any) -> None:
        told.append((event, fields))

    quick, slow = (
        Delivery(name, lambda: Collecting({"remote": Remote()}), {}, written.facts, written.folder, report)
        for name in ("quick", "slow")
    )
    quick.finish()
    quick.run()
    written_by_then = slow.unsent()
    slow.error = "it is down"
    main.flush([quick, slow], time.monotonic() + 0.4, report)

    assert [("sink.sending", {"sink": "slow", "points": written_by_then, "seconds": 0})] == told


def test_the_line_says_for_whom() -> None:
    """Messages are no points; a sink that has all and does not close is waited for, too."""
    lines = [
        RunNarrator(RunHistory()).event(event_line(events.SINK_SENDING, sink=sink, points=points, seconds=18))
        for sink, points in (("mlflow", 37), ("notify.url", 1), ("wandb", 0))
    ]
    assert [line and line.text for line in lines] == [
        "mlflow: sending the last 37 points, for at most 18.0 s",
        "notify.url: sending the last 1 message, for at most 18.0 s",
        "wandb: sending what is left, for at most 18.0 s",
    ]
