"""The sink that tells somebody of the moments of a run.

Guarantee: each moment is told once. If the process is killed between a message and the record of it, that message is
sent again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.jobfile.tables.notify import looked_up
from elasticflow.observe.records import tail
from elasticflow.run_folder import RunFolder
from elasticflow.sinks.notify import command, webhook
from elasticflow.sinks.notify.message import object_of, payload_of
from elasticflow.sinks.notify.moments import name_of
from elasticflow.sinks.sink import Sink, SinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.events import EventRecord
    from elasticflow.sinks.notify.moments import Moment, Moments
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts


class Notifier(Sink):
    """Sends a message for each moment that its options ask for: by a webhook, or by a command."""

    events_at_once = 1

    def __init__(self, options: Options, moments: Moments) -> None:
        super().__init__(options)
        self._moments = moments

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin with the launch that runs: of what was long before, nobody wants to be told now."""
        self._run = run
        self._since: str = remembered.get("since") or _began(RunFolder(run.folder))

    def remember(self) -> Remembered:
        """Return since when moments are told."""
        return {"since": self._since}

    def points(self, batch: Sequence[Point]) -> None:
        """Take no notice: what was measured is read when it is told."""
        return

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Tell of those that are moments."""
        for record in batch:
            if str(record.get("timestamp")) < self._since:
                continue
            if (moment := wanted_of(record, self.options, self._moments)) is not None:
                tell(moment, self._run, self.options)


def tell(moment: Moment, run: RunFacts, options: Options) -> None:
    """Send a message in the way that *options* say (`NotifyTable.ways`).

    Raises:
        SinkError: it did not get through; the text holds no secret.
    """
    if "command" in options:
        command.run(options["command"], object_of(moment, run), run.project_root, options["timeout_s"])
        return
    try:
        address = looked_up(options["url"], os.environ)
    except ValueError as error:
        raise SinkError(f"notify.url: {error}") from None
    webhook.post(address, payload_of(moment, run, options["format"]), options["timeout_s"])


def wanted_of(record: EventRecord, options: Options, moments: Moments) -> Moment | None:
    """Return the moment that an event of the run is, if the options ask for it."""
    return moments.of(record) if name_of(record) in options["on"] else None


def _began(folder: RunFolder) -> str:
    """Return when the newest launch began, as its event has it; empty if nothing tells."""
    starts = [each for each in tail(folder.events) if each.get("event") == events.RUN_STARTED]
    return str(starts[-1]["timestamp"]) if starts else ""
