"""Reads what a run has written since a position: metrics, events and the logs of hooks, each once."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.history import RunHistory
from elasticflow.protocol import points as logged
from elasticflow.protocol.run_files import place_of
from elasticflow.sinks.ordered_lines import Bookmark, OrderedLines
from elasticflow.sinks.sink import Point
from elasticflow.system.records import unix_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.run_folder import RunFolder
    from elasticflow.sinks.ordered_lines import Key, Record

OWN = "elasticflow/"
"""Prefix of the names of values that come from events: `elasticflow/restarts`."""
# Fields of a metrics line that locate it and are not measurements.
_PLACE = frozenset({"generation", "world_size", "step", "time", "in_epoch", "stop", "weights"})
# Fields of an evaluation's line that hold its metrics.
_EVALUATED = frozenset({"eval", "eval_raw"})
_AT_ONCE = 500


@dataclass(frozen=True)
class Position:
    """The position up to which a run was read.

    Attributes:
        events: Position in events.jsonl up to which points were made of events.
        told: Position in events.jsonl up to which the events themselves were returned.
        logged: Position in the logs of hooks, by rank.
        failures: Number of generations that had failed.
        restarts: Number of failures after which training continued.
    """

    metrics: Bookmark = field(default_factory=Bookmark)
    events: Bookmark = field(default_factory=Bookmark)
    told: Bookmark = field(default_factory=Bookmark)
    logged: dict[str, LogPlace] = field(default_factory=dict)
    failures: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Batch:
    """Points and events after a position.

    Attributes:
        points: In order of their steps.
        events: In the order of events.jsonl.
        end: The position after them; the given position if nothing is written behind it yet.
    """

    points: tuple[Point, ...]
    events: tuple[EventRecord, ...]
    end: Position


class Reader:
    """Reads a run folder while it is written; its only state is the positions that it returns."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._metrics = OrderedLines(folder.metrics, _key_of_metrics)
        self._events = OrderedLines(folder.events, _key_of_event, is_strict=False)

    def after(self, position: Position, most: int = _AT_ONCE) -> Batch:
        """Return the points after *position*, from at most *most* lines of each source.

        A step that is done again after a restart gives no second point: the first point counts.

        Raises:
            OSError: a file is there and cannot be read.
        """
        happened, events_end = self._events.read(position.events, most)
        figures, failures, restarts = _figures(happened, position)
        measured, metrics_end = self._metrics.read(position.metrics, most)
        hooks, files = self._logged(position.logged, most)
        points = heapq.merge(
            figures, [_measured(record) for record in measured], hooks, key=lambda point: point.step
        )
        end = Position(metrics_end, events_end, position.told, files, failures, restarts)
        return Batch(tuple(points), (), end)

    def events_after(self, position: Position, most: int) -> Batch:
        """Return at most *most* of the events after *position*.

        Raises:
            OSError: the file is there and cannot be read.
        """
        happened, end = self._events.read(position.told, most)
        return Batch((), tuple(happened), replace(position, told=end))

    def count(self, position: Position, *, with_events: bool) -> int:
        """Return the number of points after *position*, and of events if *with_events*.

        Raises:
            OSError: a file is there and cannot be read.
        """
        total = 0
        while (batch := self.after(position)).end != position:
            total += len(batch.points)
            position = batch.end
        return total + (self.count_events(position, lambda _: True) if with_events else 0)

    def count_events(self, position: Position, is_counted: Callable[[EventRecord], object]) -> int:
        """Return the number of events after *position* that *is_counted* accepts.

        Raises:
            OSError: the file is there and cannot be read.
        """
        total = 0
        while (batch := self.events_after(position, _AT_ONCE)).end != position:
            total += sum(bool(is_counted(event)) for event in batch.events)
            position = batch.end
        return total

    def _logged(self, files: dict[str, LogPlace], most: int) -> tuple[list[Point], dict[str, LogPlace]]:
        """Return the points that hooks logged after *files*, by step, and the new positions by rank."""
        found: list[Point] = []
        ends = dict(files)
        for generation, rank, path in sorted(logged.files_of(self._folder)):
            place = ends.get(str(rank), LogPlace())
            if generation < place.generation:
                continue
            place = place.in_generation(generation)
            lines = OrderedLines(path, lambda record: (0,) if "name" in record else None, is_strict=False)
            records, mark = lines.read(Bookmark(place.offset), most)
            taken = (place.take(record, self._folder) for record in records)
            found += [point for point in taken if point is not None]
            ends[str(rank)] = replace(place, offset=mark.offset)
            most -= len(records)
            if most <= 0:  # this file must be read first: a newer file of its rank closes it
                break
        return sorted(found, key=lambda point: point.step), ends


@dataclass(frozen=True)
class LogPlace:
    """The position up to which the logs of a rank's hooks were read.

    Attributes:
        generation: Generation of the newest file that was read.
        offset: Bytes read of that file.
        before: The last step read from older files, by name.
        here: The last step read from that file, by name.
    """

    generation: int = 0
    offset: int = 0
    before: dict[str, int] = field(default_factory=dict)
    here: dict[str, int] = field(default_factory=dict)

    def in_generation(self, number: int) -> LogPlace:
        """Return the place in the file of generation *number*, which is this place's generation or a later one."""
        if number == self.generation:
            return replace(self, here=dict(self.here))
        before = {
            name: max(self.before.get(name, -1), self.here.get(name, -1))
            for name in {**self.before, **self.here}
        }
        return LogPlace(number, 0, before)

    def take(self, record: Record, folder: Path) -> Point | None:
        """Return the point of a hook's line; None if an earlier generation gave it, or if it is damaged."""
        step, name, value = record.get("step"), record.get("name"), record.get("value")
        if type(step) is not int or not isinstance(name, str):
            return None
        call = f"{record.get('hook')}:{name}"
        if step <= self.before.get(call, -1):
            return None
        self.here[call] = max(step, self.here.get(call, -1))
        begin = Point(step, _seconds(record.get("time")), self.generation)
        match record.get("kind"):
            case "scalar" if value is None or _is_number(value):
                return replace(begin, values={name: math.nan if value is None else float(value)})
            case "text" if isinstance(value, str):
                return replace(begin, texts={name: value})
            case "image" if isinstance(value, str) and (folder / value).is_file():
                return replace(begin, images={name: folder / value})
            case _:
                return None


def _measured(record: Record) -> Point:
    values: dict[str, float] = {}
    for name, value in record.items():
        is_wanted = name in _EVALUATED if "eval" in record else name not in _PLACE
        if is_wanted:
            values.update(_numbers(name, value))
    generation = record.get("generation")
    return Point(
        record["step"],
        _seconds(record.get("time")),
        generation if isinstance(generation, int) else 0,
        values,
    )


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value of a line, by names like `eval/accuracy`; a line has non-finite numbers as texts."""
    match value:
        case dict():
            for inner, part in value.items():
                yield from _numbers(f"{name}/{inner}", part)
        case bool():
            pass
        case int() | float():
            yield name, float(value)
        case None:
            yield name, math.nan
        case "nan" | "inf" | "-inf" | "NaN" | "Infinity" | "-Infinity":
            yield name, float(value)
        case _:
            pass


def _figures(happened: list[EventRecord], position: Position) -> tuple[list[Point], int, int]:
    found = []
    history = RunHistory(failed=position.failures, restarts=position.restarts)
    for record in happened:
        history.take(record)
        if record.get("event") == events.TRAINING_STARTED and type(record.get("step")) is int:
            values = {
                f"{OWN}restarts": float(history.restarts),
                f"{OWN}generation": float(_count(record.get("generation"))),
                f"{OWN}world_size": float(_count(record.get("world_size"))),
            }
            at = unix_time(record.get("timestamp")) or 0.0
            found.append(Point(record["step"], at, _count(record.get("generation")), values))
    return found, history.failed, history.restarts


def _key_of_metrics(record: Record) -> Key | None:
    return place_of(record) if type(record.get("step")) is int else None


def _key_of_event(record: Record) -> Key | None:
    at = record.get("timestamp")
    return (at,) if isinstance(at, str) and isinstance(record.get("event"), str) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _seconds(value: object) -> float:
    return float(value) if _is_number(value) else 0.0  # type: ignore[arg-type]
