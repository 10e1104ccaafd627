"""Curves as pictures: the coordinates that a page draws, in percent of the plot, and the ticks of the axes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.observe.curves import Curve, Segment

WIDTH, HEIGHT = 1000, 240
"""Size of the plot in its own coordinates; a page stretches it."""
COLOURS = 6
"""Number of colours; generations or runs take them in turn."""
_LOG_FROM = 30.0
"""A curve whose values are all positive and spread so far is drawn on a logarithmic axis."""
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A line of a plot: its path in `WIDTH` by `HEIGHT`, its colour and its label."""

    path: str
    colour: int
    text: str
    is_lost: bool = False


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: its place in percent from the left or from the top, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A plot of a quantity.

    Attributes:
        title: Text for readers who cannot see the plot.
        lines: Lines to draw, those of lost steps first.
        is_log: True if the axis of values is logarithmic.
        marks: Steps at which a generation began, with their text.
        odd: Places at which values were not finite numbers.
        data: JSON for the pointer's tooltip: step, value, label and place of each point.
        rows: Some points for a table.
        last: The newest value in words.
    """

    name: str
    title: str
    lines: Sequence[Line]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    is_log: bool
    marks: Sequence[Tick]
    odd: Sequence[float]
    data: str
    rows: Sequence[tuple[str, str, str]]
    last: str


@dataclass(frozen=True)
class Labelled:
    """A curve with its label and colour; without a label its segments are generations, each with its own colour."""

    curve: Curve
    label: str = ""
    colour: int = 0


class _Scale:
    def __init__(self, values: Iterable[float]) -> None:
        found = sorted(values)
        low, high = found[0], found[-1]
        self.is_log = low > 0 and high / low >= _LOG_FROM
        if self.is_log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            pad = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
            self.low, self.high = low - pad, high + pad
        self._size = (self.high - self.low) or 1.0

    def y(self, value: float) -> float:
        """Return the distance of the value from the top."""
        amount = math.log10(value) if self.is_log else value
        return HEIGHT * (1 - (amount - self.low) / self._size)

    def ticks(self) -> list[Tick]:
        """Return round values on the axis."""
        if self.is_log:
            exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
            step = max(1, round(len(exponents) / _TICKS))
            wide = len(exponents) > 3
            factors = (1.0,) if wide else (1.0, 2.0, 5.0)
            values = [f * 10.0**e for e in exponents for f in factors if e % step == 0]
        else:
            values = round_values(self.low, self.high, _TICKS)
        places = [(100 * self.y(value) / HEIGHT, value) for value in values if value > 0 or not self.is_log]
        return [Tick(round(at, 2), f"{value:.6g}") for at, value in places if 0 <= at <= 100]


def round_values(low: float, high: float, count: int) -> list[float]:
    """Return about *count* round values from *low* to *high*."""
    rough = (high - low) / max(1, count)
    if rough <= 0 or not math.isfinite(rough):
        return [low]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step)
    values: list[float] = []
    while first * step <= high and len(values) < 50:
        values.append(first * step)
        first += 1
    return values


def chart_of(name: str, curves: Sequence[Labelled], begins: Mapping[int, int] | None = None) -> Chart | None:
    """Return the plot of a quantity of one or several runs; None if there is no finite value.

    Args:
        begins: First step of each generation of a single run, for marks.
    """
    points = [point for labelled in curves for point in labelled.curve.points]
    if not points:
        return None
    last_step = max(1, *(step for step, _ in points))
    scale = _Scale(value for _, value in points)
    lines, shown = [], []
    for labelled in curves:
        end: tuple[float, float] | None = None
        for segment, is_lost in _parts(labelled.curve):
            colour = labelled.colour if labelled.label else segment.generation - 1
            words = labelled.label or f"generation {segment.generation}"
            words += ", lost and done again" if is_lost else ""
            placed = [(WIDTH * step / last_step, scale.y(value)) for step, value in segment.points]
            joined = placed if is_lost or end is None else [end, *placed]
            end = end if is_lost else placed[-1]
            lines.append(Line(_path(joined), colour % COLOURS, words, is_lost))
            shown += [
                [round(x, 1), round(y, 1), step, number(value), len(lines) - 1]
                for (x, y), (step, value) in zip(placed, segment.points, strict=True)
            ]
    newest = None if curves[0].label else curves[0].curve.last
    data = {"points": sorted(shown), "labels": [line.text for line in lines]}
    odd = sorted({step for labelled in curves for step in labelled.curve.odd})
    return Chart(
        name=name,
        title=_title(name, curves, last_step),
        lines=lines,
        x_ticks=[Tick(100 * v / last_step, f"{v:,.0f}") for v in round_values(0, last_step, _TICKS)],
        y_ticks=scale.ticks(),
        is_log=scale.is_log,
        marks=_marks(begins or {}, last_step),
        odd=[100 * step / last_step for step in odd if step <= last_step],
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        rows=_rows(curves),
        last=number(newest) if newest is not None else "",
    )


def _parts(curve: Curve) -> list[tuple[Segment, bool]]:
    return [*((segment, True) for segment in curve.redone), *((segment, False) for segment in curve.segments)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:  # a dot: a line of no length with round ends
        x, y = points[0]
        return f"M{x:.1f} {y:.1f}h.01"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _marks(begins: Mapping[int, int], last_step: int) -> list[Tick]:
    return [
        Tick(100 * min(1.0, max(0, step - 1) / last_step), f"generation {generation} from step {step}")
        for generation, step in sorted(begins.items())[1:]
    ]


def _title(name: str, curves: Sequence[Labelled], last_step: int) -> str:
    """Return the values that count in words, of each curve; steps that were lost and done again do not."""
    words = []
    for labelled in curves:
        values = [value for segment in labelled.curve.segments for _, value in segment.points]
        if values:
            words.append(
                f"{labelled.label}{': ' if labelled.label else ''}first {number(values[0])}, lowest {number(min(values))}, "
                f"highest {number(max(values))}, last {number(values[-1])}"
            )
    return f"{name} over {last_step:,} steps: {'; '.join(words)}"


def _rows(curves: Sequence[Labelled], count: int = 12) -> list[tuple[str, str, str]]:
    rows = []
    for labelled in curves:
        points = [(step, value, s.generation) for s in labelled.curve.segments for step, value in s.points]
        chosen = points[:: max(1, math.ceil(len(points) / count))]
        if points and chosen[-1] != points[-1]:
            chosen.append(points[-1])
        rows += [
            (f"{step:,}", labelled.label or str(generation), number(value))
            for step, value, generation in chosen
        ]
    return rows
