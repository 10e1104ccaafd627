"""Curves of a run, read from its metrics once and reduced without loss of spikes."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.system.json_lines import lines_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

COLUMNS = 600
"""Columns of a curve: each keeps its first, lowest, highest and last value, so that the picture stays the same."""
SPEED = "samples/s"
EVALUATED = "eval "
"""Prefix of the names of evaluated quantities."""
_MOST_SERIES = 200
_SHOWN_AS = {"eval_raw": "eval raw"}
# Fields of a step's line that have no curve.
NOT_MEASURED = frozenset(
    {
        "step",
        "epoch",
        "in_epoch",
        "samples",
        "time",
        "seconds",
        "generation",
        "world_size",
        "weights",
        "best",
        "best_of",
        "count",
    }
)

Point = tuple[int, float]
"""Step and value."""


@dataclass(frozen=True)
class Segment:
    """Points of a curve that one generation contributed, in order of the steps."""

    generation: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curve:
    """A quantity over the steps.

    Attributes:
        name: Name as in the metrics: `loss`, `eval accuracy`, `lr`.
        segments: Values that count, by generation; all are finite.
        redone: Values of steps that were lost and done again.
        odd: Steps whose value is not a finite number, at most `COLUMNS`.
    """

    name: str
    segments: tuple[Segment, ...]
    redone: tuple[Segment, ...] = ()
    odd: tuple[int, ...] = ()
    last: float | None = None

    @property
    def points(self) -> Iterator[Point]:
        """All points, including those of steps that were redone."""
        for segment in (*self.segments, *self.redone):
            yield from segment.points


@dataclass
class _Series:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    generations: array[int] = field(default_factory=lambda: array("l"))
    odd: list[int] = field(default_factory=list)

    def add(self, step: int, generation: int, value: float) -> None:
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
            self.generations.append(generation)
        elif len(self.odd) < COLUMNS:
            self.odd.append(step)


def read_curves(metrics: Path, redone: Path) -> list[Curve]:
    """Return the curves of a run: loss first, then evaluated metrics, then the others; the speed comes last.

    Args:
        metrics: Lines of steps and evaluations; it may be absent, or damaged in places.
    """
    kept, speed = _read(metrics)
    lost, _ = _read(redone)
    last = max((series.steps[-1] for series in kept.values() if series.steps), default=0)
    curves = []
    for name in sorted(kept, key=_rank):
        series = kept[name]
        if not series.steps and not series.odd:
            continue
        curves.append(
            Curve(
                name,
                _segments(series, last),
                _segments(lost[name], last) if name in lost else (),
                tuple(series.odd),
                series.values[-1] if series.values else None,
            )
        )
    if speed.steps:
        curves.append(Curve(SPEED, _segments(speed, last), last=speed.values[-1]))
    return curves


def curve_of(name: str, values: Iterable[tuple[int, int, float | None]]) -> Curve:
    """Return the curve of *values*: tuples of step, generation and number, in order of steps; None is not finite."""
    series = _Series()
    for step, generation, value in values:
        series.add(step, generation, math.nan if value is None else value)
    last = series.steps[-1] if series.steps else 0
    newest = series.values[-1] if series.values else None
    return Curve(name, _segments(series, last), (), tuple(series.odd), newest)


def _rank(name: str) -> tuple[int, str]:
    if name == "loss":
        return 0, name
    return (1, name) if name.startswith(EVALUATED) else (2, name)


def _read(path: Path) -> tuple[dict[str, _Series], _Series]:
    """Return all values by name, and the speed between lines."""
    found: dict[str, _Series] = {}
    speed, pace = _Series(), _Pace()
    # This takes a third of the time of `json.loads` on bytes.
    decode = json.JSONDecoder().raw_decode
    for line in lines_of(path):
        try:
            record, _ = decode(line.decode("utf-8", "replace"))
            step, generation = record["step"], record.get("generation", 0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # torn or of another form: views report it elsewhere
        if type(step) is not int or type(generation) is not int:
            continue
        for name, value in record.items():
            if name in NOT_MEASURED:
                continue
            if type(value) is float and name in found:
                found[name].add(step, generation, value)
            else:
                _add(found, _SHOWN_AS.get(name, name), value, step, generation)
        if (rate := pace.after(record)) is not None:
            speed.add(step, generation, rate)
    return found, speed


def _add(found: dict[str, _Series], name: str, value: Any, step: int, generation: int) -> None:
    if isinstance(value, dict):
        for inner, part in value.items():
            _add(found, f"{name} {inner}", part, step, generation)
        return
    if value is None and name in found:  # a job's own scalar was not finite
        value = math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return
    try:
        amount = float(value)
    except (ValueError, OverflowError):  # another text, or a number too large for a float
        return
    series = found.get(name)
    if series is None:
        if len(found) >= _MOST_SERIES:
            return
        series = found[name] = _Series()
    series.add(step, generation, amount)


class _Pace:
    """Samples per second, measured over at least a second of a generation."""

    _LEAST_S = 1.0

    def __init__(self) -> None:
        self._generation, self._time, self._samples = -1, 0.0, 0

    def after(self, record: dict[str, Any]) -> float | None:
        time, samples = record.get("time"), record.get("samples")
        if not isinstance(time, int | float) or not isinstance(samples, int) or "eval" in record:
            return None
        generation = record.get("generation", 0)
        if generation != self._generation:
            self._generation, self._time, self._samples = generation, time, samples
            return None
        if time - self._time < self._LEAST_S:
            return None
        rate = (samples - self._samples) / (time - self._time)
        self._time, self._samples = time, samples
        return rate


def _segments(series: _Series, last: int) -> tuple[Segment, ...]:
    """Return the series as segments, in at most `COLUMNS` columns over all steps."""
    width = max(1.0, last / COLUMNS)
    found: list[tuple[int, list[Point]]] = []
    steps, values, generations = series.steps, series.values, series.generations
    begin, size = 0, len(steps)
    while begin < size:
        generation, column = generations[begin], int(steps[begin] / width)
        end = begin + 1
        while end < size and generations[end] == generation and int(steps[end] / width) == column:
            end += 1
        if not found or found[-1][0] != generation:
            found.append((generation, []))
        found[-1][1].extend(_column(steps, values, begin, end))
        begin = end
    return tuple(Segment(generation, tuple(points)) for generation, points in found)


def _column(steps: Sequence[int], values: Sequence[float], begin: int, end: int) -> list[Point]:
    """Return the first, lowest, highest and last of these points, in order."""
    if end - begin <= 4:
        return [(steps[i], values[i]) for i in range(begin, end)]
    lowest = min(range(begin, end), key=values.__getitem__)
    highest = max(range(begin, end), key=values.__getitem__)
    return [(steps[i], values[i]) for i in sorted({begin, lowest, highest, end - 1})]
