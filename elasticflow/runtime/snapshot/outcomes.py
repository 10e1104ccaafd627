"""What becomes of snapshots, as rank 0 tells it."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.snapshots.client.staging import BEGUN

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.client.staging import StagingClient

_OF_THE_WRITER = frozenset(
    {events.SNAPSHOT_COMMITTED, events.SNAPSHOT_REMOVED, events.SNAPSHOT_FAILED, events.STORE_TROUBLE}
)


class Outcomes:
    """Hears the writer and logs what it says.

    Args:
        me: This worker.
        client: To the node's writer.

    Attributes:
        facts: Of the snapshot staged or wished for last: bytes, stall_s.
    """

    def __init__(self, me: Worker, client: StagingClient) -> None:
        self._me, self._client = me, client
        self._poll = select.poll()
        self._poll.register(client.fileno(), select.POLLIN)
        self.facts: dict[str, Any] = {}

    def look(self) -> None:
        """Log what the writer has said, if anything; never waits."""
        if self._client.is_awaiting and self._poll.poll(0):  # asking the client takes 30 times as long
            self.log(self._client.reports())

    def staged(self, **facts: Any) -> None:
        """Log that the writer has a snapshot's bytes."""
        me, single = self._me, self._client.single
        if me.rank == 0:
            me.event(events.SNAPSHOT_STAGED, **self.facts, **facts)
            if single is not None:
                me.event(events.STAGING_SINGLE, reason=single)
                self._client.single = None

    def log(self, reports: list[dict[str, Any]]) -> None:
        """Log the writer's *reports*."""
        me = self._me
        for report in reports:
            event = report.pop("event")
            if event == BEGUN:
                self.staged(**report)
            # Under our agent the writer's own reports become events.
            elif me.rank == 0 and me.identity.way != "launched" and event in _OF_THE_WRITER:
                report.pop("generation", None)
                me.event(events.EVENTS[event], **report)
