"""Reports of a node's writer: the outcome of a snapshot, and trouble with the store."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from elasticflow import events
from elasticflow.storage.storage import Trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.events import EventRecord


FENCED = "fenced"
"""Reason of a failed snapshot: a later generation exists, started by another launch."""
_TROUBLES_EVERY_S = 10.0


@dataclass(frozen=True)
class SnapshotReport:
    """The outcome of a snapshot.

    Attributes:
        event: `snapshot.committed`, `snapshot.failed` or `snapshot.removed`.
        bytes: Size of the snapshot's files, if this node committed it; the next two are given then, too.
        seconds: From the first staged shard to the commit.
    """

    event: str
    name: str
    step: int
    generation: int
    bytes: int | None = None
    seconds: float | None = None
    trigger: str | None = None
    reason: str | None = None


WriterReport = SnapshotReport | Trouble


def as_event(report: WriterReport) -> EventRecord:
    """Return the report as an event without the fields that all events have."""
    match report:
        case SnapshotReport():
            return {key: value for key, value in vars(report).items() if value is not None}
        case Trouble():
            return {
                "event": events.STORE_TROUBLE,
                "operation": report.operation,
                "class": report.kind,
                "error": report.error,
                "attempt": report.attempt,
                "pause_s": round(report.pause_s, 1),
            }
        case _:
            assert_never(report)


class ThrottledTroubles:
    """Passes on what `Storage` reports of operations that are tried again; used from any thread.

    Args:
        report: Called with the first, and then with at most one every ten seconds.
    """

    def __init__(
        self, report: Callable[[Trouble], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._reported_at = -math.inf

    def __call__(self, trouble: Trouble) -> None:
        """Report *trouble*, unless one was reported a moment ago."""
        with self._lock:
            now = self._clock()
            if now - self._reported_at < _TROUBLES_EVERY_S:
                return
            self._reported_at = now
        self._report(trouble)
