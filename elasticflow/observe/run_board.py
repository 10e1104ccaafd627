"""What stands below the lines about a run that goes on: how far it is, its group, its newest snapshot, its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.terminal.activities import Doing, awaited_of, doing_of, whole_seconds
from elasticflow.observe.terminal.event_lines import epoch_of, rates_of
from elasticflow.observe.terminal.formats import elapsed, number, plural, size
from elasticflow.observe.terminal.measures import parts_of_speed, parts_of_step
from elasticflow.observe.terminal.pace import Pace
from elasticflow.observe.terminal.screen import Part
from elasticflow.system.records import Record, float_of, int_of, unix_time

if TYPE_CHECKING:
    from os import terminal_size

    from elasticflow.observe.terminal.screen import Row

TIME_WIDTH, LABEL_WIDTH = 8, 13
TEXT_COLUMN = TIME_WIDTH + 2 + 2 + LABEL_WIDTH + 2
_WIDE = 120
# A node that went stays in sight for so long.
_GONE_S = 10.0
# A step is told to take long from here on.
_LONG_STEP_S = 5.0
_DIM, _DONE, _LOST = "2", "36", "31"


@dataclass(frozen=True)
class _Lane:
    """A node: its workers, the machine, its first rank if it takes part, and since when (unix) it is gone, how."""

    nproc: int
    host: str
    first_rank: int | None = None
    gone: str = ""
    gone_at: float = 0.0


class RunBoard:
    """Takes in records of a run, and says what is true now.

    Attributes:
        steps: Steps of the whole training, once known.
        doing: What the run is at if it does not train, as far as events tell.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self.doing: Doing | None = None
        self._pace = Pace()
        self._step: Record | None = None  # the newest line of one
        self._has_stepped = False
        self._generation = 0
        self._group = ""
        self._epochs: int | None = None
        self._left: int | None = None
        self._activities: dict[str, Record] = {}
        self._snapshot: Record | None = None
        self._lanes: dict[str, _Lane] = {}
        self._is_over = False

    def event(self, record: Record) -> None:
        """Take in one record of events.jsonl."""
        at = unix_time(record.get("timestamp")) or 0.0
        name = record.get("event")
        if (doing := _DOING.get(str(name))) is not None and not (
            self._has_stepped and name == events.NODE_JOINED
        ):
            self.doing = Doing(doing[0], doing[1], at)
        self._follow_nodes(record, at)
        match name:
            case events.GENERATION_STARTED:
                self._begin_group(record)
            case events.TRAINING_STARTED | events.STAGE_STARTED:
                self.steps = int_of(record, "steps") or None
            case events.TRAINING_FIRST_STEP:
                self._has_stepped, self.doing = True, None
            case events.SNAPSHOT_COMMITTED:
                self._snapshot = record
            case events.NODE_LOST if not self._takes_part(str(record.get("node"))):
                pass
            case events.WORKER_FAILED | events.NODE_LOST | events.GENERATION_ENDED:
                self._end_group(at, goes_on=record.get("class") not in _LAST_ENDS)
            case events.RUN_FINISHED | events.RUN_FAILED | events.RUN_INTERRUPTED:
                self._is_over = True
            case _:
                pass

    def known(self, record: Record) -> None:
        """Take in what is known beside the events (`protocol/display.py`)."""
        self._epochs = int_of(record, "epochs") or None
        self._left = None if float_of(record, "budget_left") is None else int_of(record, "budget_left")
        activities = record.get("activities")
        self._activities = (
            {str(node): at for node, at in activities.items() if isinstance(at, Mapping)}
            if isinstance(activities, Mapping)
            else {}
        )

    def metrics(self, record: Record) -> None:
        """Take in one record of metrics.jsonl."""
        self._pace.add(record)
        if record.get("loss") is not None and record.get("eval") is None:
            self._step = record

    def now(self, at: float) -> Doing | None:
        """Return what the run is at at the unix time *at*, if that is worth telling."""
        if self._is_over:
            return None
        # What nodes do that are about to join holds up nobody.
        taking_part = {
            node: activity
            for node, activity in self._activities.items()
            if not self._has_stepped or self._takes_part(node)
        }
        awaited = awaited_of(taking_part, has_stepped=self._has_stepped)
        if awaited is None or (self.doing is not None and awaited.label in {"training", "leaving"}):
            return self.doing
        if awaited.label == "training" and self._has_stepped and at - awaited.since < _LONG_STEP_S:
            return None
        return awaited

    def progress(self, *, share: bool = False) -> list[str]:
        """Return where training is and how fast, the most important first; empty while it does not train."""
        record = self._step
        if record is None or not self._has_stepped:
            return []
        step = int_of(record, "step")
        count = f"step {step}" if self.steps is None else f"step {step:>{len(str(self.steps))}}/{self.steps}"
        if share and self.steps:
            count += f" ({100 * step // self.steps} %)"
        parts = [count, f"loss {number(record.get('loss'))}"]
        left = None if self.steps is None else self._pace.seconds_left(step, self.steps)
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
        """Return `snapshot of step 400, 12 s ago, 1.2 MB`; empty if there is none."""
        record = self._snapshot
        if record is None:
            return ""
        made = unix_time(record.get("timestamp"))
        parts = [f"step {int_of(record, 'step')}"]
        parts += [] if made is None else [f"{whole_seconds(at - made)} ago"]
        parts += [] if (num_bytes := float_of(record, "bytes")) is None else [size(num_bytes)]
        return ", ".join(parts)

    def rows(self, at: float, clock: str, note: str, room: terminal_size, *, pretty: bool) -> list[Row]:
        """Return the rows that a terminal shows at the unix time *at*.

        Args:
            at: Now.
            clock: How long the launch has lasted.
            note: The sign of a row.
            room: Columns and lines.
            pretty: Signs beyond ASCII are there.
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
        if not self._has_stepped and not progress:
            return [*rows, *self._lane_rows(at, note, room.lines - len(rows))]
        for label, text in self._facts(at, room.columns):
            add(label, [Part(text, _DIM)])
        return [*rows, *self._lane_rows(at, note, room.lines - len(rows))]

    def _progress(self, parts: list[str], columns: int, *, pretty: bool) -> tuple[list[Part], list[Part]]:
        """Return the row with the bar, and what has no room in it."""
        count, *others = parts
        first = [Part(count)]
        room = columns - 1 - TEXT_COLUMN - len(count)
        step = int_of(self._step or {}, "step")
        if self.steps:
            width = 20 if columns >= _WIDE else 10
            first += [Part("  "), *_bar(step / self.steps, width, pretty=pretty)]
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
        group = [self._group, f"generation {self._generation}"] if self._group else []
        if self._left is not None:
            group.append(f"{plural(self._left, 'restart')} left")
        snapshot = self.snapshot(at)
        both = f"{', '.join(group)}; snapshot of {snapshot}"
        if group and snapshot and TEXT_COLUMN + len(both) < columns:
            return [("workers", both)]
        rows = [("workers", ", ".join(group))] if group else []
        return [*rows, ("snapshot", snapshot)] if snapshot else rows

    def _lane_rows(self, at: float, note: str, room: int) -> list[Row]:
        """Return a row for each node if there are several; as many as a third of the terminal holds."""
        lanes = {
            node: lane for node, lane in self._lanes.items() if not lane.gone or at - lane.gone_at < _GONE_S
        }
        for node in self._activities:
            lanes.setdefault(node, _Lane(0, ""))
        if len(lanes) < 2:
            return []
        most = max(1, room // 2 - 1)
        rows = [self._lane_row(node, lane, at, note) for node, lane in list(lanes.items())[:most]]
        if len(lanes) > most:
            left = " " * TEXT_COLUMN
            rows.append([Part(f"{left}and {plural(len(lanes) - most, 'node')} more", _DIM)])
        return rows

    def _lane_row(self, node: str, lane: _Lane, at: float, note: str) -> Row:
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
        doing = None if activity is None else doing_of(activity, has_stepped=self._has_stepped)
        tail = "" if doing is None else f"  {doing.label}: {doing.lasting(at)}"
        return [*head, Part(f"{place}{where}", _DIM), Part(tail)]

    def _begin_group(self, record: Record) -> None:
        self._pace.clear()
        self._generation = int_of(record, "generation")
        members = record.get("members")
        names = [str(name) for name in members] if isinstance(members, list | tuple) else list(self._lanes)
        first, ranks = 0, {}
        for name in names:
            ranks[name] = first
            first += self._lanes[name].nproc if name in self._lanes else 0
        self._lanes = {name: replace(lane, first_rank=ranks.get(name)) for name, lane in self._lanes.items()}
        workers, nodes = int_of(record, "world_size"), max(1, len(names))
        self._group = f"{plural(workers, 'worker')} on {plural(nodes, 'node')}"

    def _end_group(self, at: float, *, goes_on: bool) -> None:
        self._pace.clear()
        self._step, self._has_stepped = None, False
        if goes_on:
            self.doing = Doing("restarting", "the next group is formed", at)

    def _takes_part(self, node: str) -> bool:
        return node in self._lanes and self._lanes[node].first_rank is not None

    def _follow_nodes(self, record: Record, at: float) -> None:
        node = str(record.get("node"))
        lane = self._lanes.get(node, _Lane(0, ""))
        match record.get("event"):
            case events.NODE_JOINED:
                self._lanes[node] = _Lane(int_of(record, "nproc"), str(record.get("host") or ""))
            case events.NODE_LOST:
                self._lanes[node] = replace(lane, gone="lost", gone_at=at)
            case events.NODE_LEFT:
                self._lanes[node] = replace(lane, gone="left", gone_at=at)
            case events.NODE_EXCLUDED:
                self._lanes[node] = replace(lane, gone="excluded", gone_at=at)
            case _:
                pass


# What a run is at after an event, until something else is heard of it.
_DOING: dict[str, tuple[str, str]] = {
    events.RUN_STARTED: ("starting", "importing torch"),
    events.NODE_JOINED: ("starting", "a group is formed"),
    events.GENERATION_STARTED: ("starting", "the workers come up"),
    events.SCRIPT_STARTED: ("running", "the script"),
    events.TRAINING_STARTED: ("starting", "the first step"),
    events.DRAIN_REQUESTED: ("leaving", "after the same step"),
    events.TRAINING_FINISHED: ("ending", "the last snapshot is written"),
}
# Classes of ends after which nothing is formed any more, as a rule.
_LAST_ENDS = frozenset({"finished", "drained"})


def _bar(share: float, width: int, *, pretty: bool) -> list[Part]:
    full = max(0, min(width, round(share * width)))
    done, rest = ("━", "─") if pretty else ("=", "-")
    return [Part(done * full, _DONE), Part(rest * (width - full), _DIM)]
