"""A live view of a run in another terminal: read from the run's files, so that nothing here touches the run."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.cli.output import run_word, shortest_path
from elasticflow.launcher.agent.printed import RankPrints
from elasticflow.observe.live_view import LiveView
from elasticflow.observe.records import parse
from elasticflow.observe.status import is_locked
from elasticflow.observe.worker_logs import generations
from elasticflow.protocol.run_files import known_record, printed_record
from elasticflow.system import records
from elasticflow.system.json_lines import FollowedLines

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

_LOOK_S = 0.2


def follow(folder: RunFolder) -> None:
    """Show the newest launch so far, and continue until no supervisor leads the run."""
    view = LiveView.on(sys.stdout, os.environ, shortest_path(folder.path), run_word(folder))
    happened = FollowedLines(folder.events)
    measured = FollowedLines(folder.metrics, begins_at=_size(folder))
    beside = _Beside(folder)
    try:
        for record in _of_newest_launch(_records(happened)):
            view.show(record)
        while True:
            # The check comes first: the last records of a supervisor that has just ended are then still read.
            is_live = is_locked(folder)
            for record in (*_records(measured), *_records(happened), *beside.look(is_over=not is_live)):
                view.show(record)
            if not is_live:
                return
            view.tick()
            time.sleep(_LOOK_S)
    finally:
        view.close()


class _Beside:
    """The parts of a run that are not events: its state, and the lines that rank 0 prints from now on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._known: Record = {}
        there = generations(folder)
        self._generation = there[-1] if there else 0
        self._prints = self._following(begins_at_end=True) if there else None

    def look(self, *, is_over: bool) -> list[Record]:
        """Return the new records; *is_over*: the run has ended, and nothing more is written."""
        new: list[Record] = []
        state = records.read(self._folder.state)
        if isinstance(state, dict) and not is_over and (known := known_record(state)) != self._known:
            self._known = known
            new.append(known)
        newest = (generations(self._folder) or [0])[-1]
        is_next = newest != self._generation
        if self._prints is not None:
            is_last = is_over or is_next
            lines, left_out = self._prints.end(has_failed=True) if is_last else self._prints.take()
            new += [printed_record(lines, left_out)] if lines or left_out else []
        if is_next:
            self._generation = newest
            self._prints = self._following(begins_at_end=False)
        return new

    def _following(self, *, begins_at_end: bool) -> RankPrints:
        return RankPrints(self._folder, self._generation, time.monotonic, begins_at_end=begins_at_end)


def _records(lines: FollowedLines) -> list[Record]:
    return [record for line in lines.look() if (record := parse(line)) is not None]


def _of_newest_launch(records: list[Record]) -> list[Record]:
    begins = [i for i, record in enumerate(records) if record.get("event") == events.RUN_STARTED]
    return records[begins[-1] :] if begins else records


def _size(folder: RunFolder) -> int:
    try:
        return folder.metrics.stat().st_size
    except OSError:
        return 0
