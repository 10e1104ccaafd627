"""A run as it goes on, in another terminal than its own: read from its files, so that nothing here touches it."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.cli.output import shortest_path
from elasticflow.observe.records import parse
from elasticflow.observe.status import is_locked
from elasticflow.observe.terminal.live_view import LiveView
from elasticflow.system.json_lines import FollowedLines

if TYPE_CHECKING:
    from elasticflow.observe.records import Record
    from elasticflow.run_folder import RunFolder

_LOOK_S = 0.2


def follow(folder: RunFolder) -> None:
    """Show the newest launch so far, and go on until no supervisor leads the run."""
    view = LiveView.on(sys.stdout, os.environ, shortest_path(folder.path))
    happened = FollowedLines(folder.events)
    measured = FollowedLines(folder.metrics, begins_at=_size(folder))
    try:
        for record in _of_newest_launch(_records(happened)):
            view.show(record)
        while True:
            # First whether it lives: what a supervisor writes before it ends is read after that.
            is_live = is_locked(folder)
            for record in (*_records(measured), *_records(happened)):
                view.show(record)
            if not is_live:
                return
            time.sleep(_LOOK_S)
    finally:
        view.close()


def _records(lines: FollowedLines) -> list[Record]:
    """Return what was written since the last look."""
    return [record for line in lines.look() if (record := parse(line)) is not None]


def _of_newest_launch(records: list[Record]) -> list[Record]:
    begins = [i for i, record in enumerate(records) if record.get("event") == events.RUN_STARTED]
    return records[begins[-1] :] if begins else records


def _size(folder: RunFolder) -> int:
    try:
        return folder.metrics.stat().st_size
    except OSError:
        return 0
