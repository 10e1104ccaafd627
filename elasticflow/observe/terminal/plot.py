"""A curve in characters: dots of braille, or stars on a terminal without braille."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import number

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOG_FROM = 30.0
# Bits of the eight dots of a braille sign, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_LEAST_WIDTH = 10


def plot(points: Sequence[tuple[int, float]], width: int, height: int, *, pretty: bool) -> list[str]:
    """Return the lines of a plot of at least one point, all finite: values upwards, steps to the right.

    Values that are all positive and spread over more than a factor of 30 have a logarithmic axis, which the plot
    states.

    Args:
        points: Pairs of step and value.
        width: Columns, including the axis.
        height: Lines of the plot itself; a line for the steps follows.
        pretty: True if the terminal has braille.
    """
    values = [value for _, value in points]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= _LOG_FROM
    labels = [number(high), number(low)]
    room = max(map(len, labels)) + 2
    columns = max(_LEAST_WIDTH, width - room)
    across, down = (2, 4) if pretty else (1, 1)
    first, last = points[0][0], max(step for step, _ in points)
    cells = [[0] * columns for _ in range(height)]
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - first) / max(1, last - first) * (columns * across - 1))
        y = round(_share(value, low, high, is_log=is_log) * (height * down - 1))
        for at_x, at_y in _line(before, (x, y)):
            row = height * down - 1 - at_y
            cells[row // down][at_x // across] |= _DOTS[at_x % across][row % down] if pretty else 1
        before = x, y
    rows = [
        "".join(chr(_BRAILLE + cell) if pretty else " *"[cell] for cell in line).rstrip("⠀ ")
        for line in cells
    ]
    heads = [labels[0] if i == 0 else labels[1] if i == height - 1 else "" for i in range(height)]
    bar = "│" if pretty else "|"
    lines = [f"{head:>{room - 2}} {bar}{row}" for head, row in zip(heads, rows, strict=True)]
    end = f"step {last:,}" + (", logarithmic" if is_log else "")
    return [*lines, f"{'':>{room - 1}}{f'{first:,}':<{max(1, columns - len(end))}}{end:>{len(end) + 1}}"]


def _share(value: float, low: float, high: float, *, is_log: bool) -> float:
    """Return the height of *value* in the plot, from 0 to 1."""
    if is_log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return 0.5 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)  # no overflow


def _line(begin: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from *begin* to *end*, without the first."""
    if begin is None:
        return [end]
    (x0, y0), (x1, y1) = begin, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)) for i in range(1, count + 1)
    ]
