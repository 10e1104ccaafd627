"""The sink that sends messages about the moments of a run.

Guarantee: each moment is sent once. If the process is killed between a message and the record of it, that message is
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
from elasticflow.system.records import int_of

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
        """Begin with the present launch: messages about earlier launches would come too late."""
        self._run = run
        self._first_launch: int = remembered.get("launch") or _newest_launch(RunFolder(run.folder))

    def remember(self) -> Remembered:
        """Return the number of the first launch whose moments are sent; a time would not do, since clocks may be set back or differ."""
        return {"launch": self._first_launch}

    def points(self, batch: Sequence[Point]) -> None:
        """Ignore the points: `Moments` reads the metrics when a message needs them."""
        return

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Send a message for each event that is a moment."""
        for record in batch:
            moment = wanted_of(record, self.options, self._moments)
            if moment is not None and moment.launch >= self._first_launch:
                tell(moment, self._run, self.options)


def tell(moment: Moment, run: RunFacts, options: Options) -> None:
    """Send a message in the way that *options* say (`NotifyTable.ways`).

    Raises:
        SinkError: the message did not get through; the text holds no secret.
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
    """Return the moment of an event, if the options ask for it."""
    return moments.of(record) if name_of(record) in options["on"] else None


def _newest_launch(folder: RunFolder) -> int:
    """Return the number of the newest launch as in its event; 0 if no event tells."""
    starts = [each for each in tail(folder.events) if each.get("event") == events.RUN_STARTED]
    return int_of(starts[-1], "launch") if starts else 0
