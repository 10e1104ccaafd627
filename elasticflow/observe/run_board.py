"""The rows below the event lines of a run: progress, worker group, newest snapshot and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.history import Node
from elasticflow.observe.terminal.activities import OF_PHASES, Doing, awaited_of, doing_of, whole_seconds
from elasticflow.observe.terminal.event_lines import epoch_of, rates_of
from elasticflow.observe.terminal.formats import elapsed, number, plural, size
from elasticflow.observe.terminal.measures import parts_of_speed, parts_of_step
from elasticflow.observe.terminal.pace import Pace
from elasticflow.observe.terminal.screen import Part
from elasticflow.system.records import Record, float_of, int_of

if TYPE_CHECKING:
    from os import terminal_size

    from elasticflow.observe.history import RunHistory
    from elasticflow.observe.terminal.screen import Row

TIME_WIDTH, LABEL_WIDTH = 8, 13
TEXT_COLUMN = TIME_WIDTH + 2 + 2 + LABEL_WIDTH + 2
_WIDE = 120
# Seconds for which a node that is gone stays in sight.
_GONE_S = 10.0
# Seconds after which a step is reported as long.
_LONG_STEP_S = 5.0
_DIM, _DONE, _LOST = "2", "36", "31"


class RunBoard:
    """The present state of a run in a few rows.

    Args:
        history: History of the events so far; the board gets each event after the history has taken it.
    """

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._pace = Pace()
        self._step: Record | None = None  # the newest line of a step
        self._epochs: int | None = None
        self._left: int | None = None
        self._activities: dict[str, Record] = {}

    def event(self, record: Record) -> None:
        """Forget the speed, and the newest step, of a group that has ended."""
        name = record.get("event")
        if name in _ENDS and not self._history.is_training:
            self._step = None
        if name == events.GENERATION_STARTED or self._step is None:
            self._pace.clear()

    def known(self, record: Record) -> None:
        """Take facts beside the events (`protocol/run_files.py`)."""
        self._epochs = int_of(record, "epochs") or None
        self._left = None if float_of(record, "budget_left") is None else int_of(record, "budget_left")
        activities = record.get("activities")
        self._activities = (
            {str(node): at for node, at in activities.items() if isinstance(at, Mapping)}
            if isinstance(activities, Mapping)
            else {}
        )

    def metrics(self, record: Record) -> None:
        """Take a record of metrics.jsonl."""
        self._pace.add(record)
        if record.get("loss") is not None and record.get("eval") is None:
            self._step = record

    def now(self, at: float) -> Doing | None:
        """Return the run's activity at the Unix time *at*; None if it is not worth a row."""
        if self._is_over:
            return None
        history = self._history
        doing = doing_in_phase(history)
        # Activities of nodes that are about to join delay no other node.
        taking_part = {
            node: activity
            for node, activity in self._activities.items()
            if not history.is_training or history.nodes.get(node, Node(node)).first_rank is not None
        }
        awaited = awaited_of(taking_part, has_stepped=history.is_training)
        if awaited is None or (doing is not None and awaited.label in {"training", "leaving"}):
            return doing
        if awaited.label == "training" and history.is_training and at - awaited.since < _LONG_STEP_S:
            return None
        return awaited

    def progress(self, *, share: bool = False) -> list[str]:
        """Return progress and speed of training, the most important part first; empty while the run does not train."""
        record = self._step
        if record is None or not self._history.is_training:
            return []
        step, steps = int_of(record, "step"), self._history.steps
        count = f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"
        if share and steps:
            count += f" ({100 * step // steps} %)"
        parts = [count, f"loss {number(record.get('loss'))}"]
        left = None if steps is None else self._pace.seconds_left(step, steps)
        parts += [] if left is None else [f"{elapsed(left).split('.')[0]} left"]
        per_s = self._pace.samples_per_s
        parts += [] if per_s is None else [f"{per_s:,.0f} samples/s"]
        parts += parts_of_speed(record)
        if (epoch := epoch_of(record)) is not None:
            parts.append(f"epoch {epoch}" + ("" if self._epochs is None else f"/{self._epochs}"))
        parts += parts_of_step(record)
        if rates := rates_of(record):
            parts.append(f"lr {rates}")
        return parts

    def snapshot(self, at: float) -> str:
        """Return `snapshot of step 400, 12 s ago, 1.2 MB`; empty if there is no snapshot."""
        snapshot = self._history.snapshot
        if snapshot is None:
            return ""
        parts = [f"step {snapshot.step}"]
        parts += [] if snapshot.at is None else [f"{whole_seconds(at - snapshot.at)} ago"]
        parts += [] if snapshot.num_bytes is None else [size(snapshot.num_bytes)]
        return ", ".join(parts)

    def rows(self, at: float, clock: str, note: str, room: terminal_size, *, pretty: bool) -> list[Row]:
        """Return the rows that a terminal shows at the Unix time *at*.

        Args:
            at: Present Unix time.
            clock: Duration of the launch, in words.
            note: Sign at the start of a row.
            pretty: Use signs beyond ASCII.
        """
        doing, progress = self.now(at), self.progress()
        rows: list[Row] = []
        if self._is_over:
            return rows

        def add(label: str, parts: list[Part], sign: str = note) -> None:
            head = f"{'' if rows else clock:>{TIME_WIDTH}}  "
            name = f"{sign} {label:<{LABEL_WIDTH}}  " if label else " " * (TEXT_COLUMN - TIME_WIDTH - 2)
            rows.append([Part(head, _DIM), Part(name), *parts])

        if progress:
            first, rest = self._progress(progress, room.columns, pretty=pretty)
            add("training", first)
            if rest:
                add("", rest)
        if doing is not None:
            add(doing.label, [Part(doing.lasting(at))])
        if not self._history.is_training and not progress:
            return [*rows, *self._lane_rows(at, note, room.lines - len(rows))]
        for label, text in self._facts(at, room.columns):
            add(label, [Part(text, _DIM)])
        return [*rows, *self._lane_rows(at, note, room.lines - len(rows))]

    def _progress(self, parts: list[str], columns: int, *, pretty: bool) -> tuple[list[Part], list[Part]]:
        """Return the row with the bar, and the parts that do not fit in it."""
        count, *others = parts
        first = [Part(count)]
        room = columns - 1 - TEXT_COLUMN - len(count)
        step = int_of(self._step or {}, "step")
        if self._history.steps:
            width = 20 if columns >= _WIDE else 10
            first += [Part("  "), *_bar(step / self._history.steps, width, pretty=pretty)]
            room -= width + 2
        while others and len(others[0]) + 2 <= room:
            room -= len(others[0]) + 2
            first.append(Part(f"  {others.pop(0)}"))
        second: list[Part] = []
        room = columns - 1 - TEXT_COLUMN
        for text in others:
            if len(text) <= room:
                second.append(Part(f"{text}  "))
                room -= len(text) + 2
        return first, second

    def _facts(self, at: float, columns: int) -> list[tuple[str, str]]:
        newest, group = self._history.group, []
        if newest is not None:
            workers, nodes = newest.world_size or 0, max(1, len(newest.members))
            group = [f"{plural(workers, 'worker')} on {plural(nodes, 'node')}", f"generation {newest.number}"]
        if self._left is not None:
            group.append(f"{plural(self._left, 'restart')} left")
        snapshot = self.snapshot(at)
        both = f"{', '.join(group)}; snapshot of {snapshot}"
        if group and snapshot and TEXT_COLUMN + len(both) < columns:
            return [("workers", both)]
        rows = [("workers", ", ".join(group))] if group else []
        return [*rows, ("snapshot", snapshot)] if snapshot else rows

    def _lane_rows(self, at: float, note: str, room: int) -> list[Row]:
        """Return a row for each node if there are several; the rows fill at most a third of the terminal."""
        nodes = self._history.nodes.items()
        lanes = {name: node for name, node in nodes if not node.gone or at - node.gone_at < _GONE_S}
        for name in self._activities:
            lanes.setdefault(name, Node(name))
        if len(lanes) < 2:
            return []
        most = max(1, room // 2 - 1)
        rows = [self._lane_row(node, lane, at, note) for node, lane in list(lanes.items())[:most]]
        if len(lanes) > most:
            left = " " * TEXT_COLUMN
            rows.append([Part(f"{left}and {plural(len(lanes) - most, 'node')} more", _DIM)])
        return rows

    def _lane_row(self, node: str, lane: Node, at: float, note: str) -> Row:
        head = [Part(" " * (TIME_WIDTH + 2)), Part(f"{note} {node:<{LABEL_WIDTH}}  ", _DIM)]
        if lane.gone:
            return [*head, Part(f"{lane.gone} {whole_seconds(at - lane.gone_at)} ago", _LOST)]
        if lane.first_rank is None:
            place = "takes no part yet" if lane.nproc else "joins"
        else:
            last = lane.first_rank + lane.nproc - 1
            place = f"rank {last}" if lane.nproc == 1 else f"ranks {lane.first_rank}-{last}"
        where = f" on {lane.host}" if lane.host else ""
        activity = self._activities.get(node)
        doing = None if activity is None else doing_of(activity, has_stepped=self._history.is_training)
        tail = "" if doing is None else f"  {doing.label}: {doing.lasting(at)}"
        return [*head, Part(f"{place}{where}", _DIM), Part(tail)]

    @property
    def _is_over(self) -> bool:
        launches = self._history.launches
        return bool(launches) and launches[-1].end is not None


def doing_in_phase(history: RunHistory) -> Doing | None:
    """Return the activity of a run as its events tell; None while it trains."""
    if history.phase is None:
        return None
    event, since = history.phase
    return Doing(*OF_PHASES.get(event, ("restarting", "the next group is formed")), since)


_ENDS = frozenset({events.WORKER_FAILED, events.NODE_LOST, events.GENERATION_ENDED})


def _bar(share: float, width: int, *, pretty: bool) -> list[Part]:
    full = max(0, min(width, round(share * width)))
    done, rest = ("━", "─") if pretty else ("=", "-")
    return [Part(done * full, _DONE), Part(rest * (width - full), _DIM)]
