"""The picture of what `scale.py` has measured: CPU seconds over the number of nodes, one small plot for each part; pure."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from tests.measured.benchmarks.scale_figures import growth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.measured.benchmarks.scale_figures import Phase

_WIDTH, _HEIGHT, _LEFT, _TOP = 270, 190, 46, 44
_COLUMNS = 3
_STYLE = """
    .back { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
    .grid { stroke: #d0d7de; stroke-width: 1 } .now { stroke: #0969da } .before { stroke: #cf222e; stroke-dasharray: 5 4 }
    .line { fill: none; stroke-width: 2 } .dot { fill: #0969da } .olddot { fill: #cf222e }
    .linear { stroke: #59636e; stroke-dasharray: 1.5 3; fill: none }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #30363d }
      .now { stroke: #4493f8 } .before { stroke: #ff7b72 } .dot { fill: #4493f8 } .olddot { fill: #ff7b72 } .linear { stroke: #9198a1 }
    }
"""


class _Axes(NamedTuple):
    """Logarithms of what lies at the borders of each plot."""

    least_x: float
    most_x: float
    least_y: float
    most_y: float

    def x(self, nodes: float) -> float:
        """Return the place of a number of nodes, from the left."""
        share = (math.log10(nodes) - self.least_x) / ((self.most_x - self.least_x) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - 24)

    def y(self, seconds: float) -> float:
        """Return the place of CPU seconds, from the top."""
        share = (math.log10(seconds) - self.least_y) / ((self.most_y - self.least_y) or 1.0)
        return _TOP + (1 - share) * (_HEIGHT - _TOP - 24)


def drawing(now: Sequence[Phase], before: Sequence[Phase] = ()) -> str:
    """Return an SVG of the CPU seconds that supervisor and key server took, and took *before*, for each part of a launch."""
    # While a snapshot is written, what they take is what they take anyway: its costs are the store's.
    now, before = ([phase for phase in phases if not phase.operations] for phases in (now, before))
    titles = list(dict.fromkeys(phase.title for phase in now))
    rows = -(-len(titles) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH + 20, rows * _HEIGHT + 50
    axes = _axes([*now, *before])
    parts = []
    for number, title in enumerate(titles):
        x, y = 10 + number % _COLUMNS * _WIDTH, 30 + number // _COLUMNS * _HEIGHT
        own = {"now": _points(now, title), "before": _points(before, title)}
        parts.append(f'<g transform="translate({x} {y})">{_plot(title, axes, own)}</g>')
    text = "; ".join(_words(title, _points(now, title)) for title in titles)
    head = "CPU seconds of supervisor and key server by number of nodes: blue now, red before, dotted: as the nodes grow"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'aria-labelledby="title text" font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif" '
        f'font-size="13">\n  <title id="title">{head}</title>\n  <desc id="text">{escape(text)}</desc>\n'
        f"  <style>{_STYLE}  </style>\n"
        f'  <rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>\n'
        f'  <text x="20" y="24">{head}</text>\n  ' + "\n  ".join(parts) + "\n</svg>\n"
    )


def _points(phases: Sequence[Phase], title: str) -> list[tuple[int, float]]:
    return [(phase.nodes, phase.cpu_s) for phase in phases if phase.title == title and phase.cpu_s > 0]


def _words(title: str, points: Sequence[tuple[int, float]]) -> str:
    return f"{title}: " + ", ".join(f"{nodes:,} nodes {seconds:.2g} s" for nodes, seconds in points)


def _axes(phases: Sequence[Phase]) -> _Axes:
    nodes = [math.log10(phase.nodes) for phase in phases]
    seconds = [math.log10(phase.cpu_s) for phase in phases if phase.cpu_s > 0]
    return _Axes(min(nodes), max(nodes), math.floor(min(seconds)), math.ceil(max(seconds)))


def _plot(title: str, axes: _Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    right, bottom = _WIDTH - 24, _HEIGHT - 24
    exponent = growth(curves["now"])
    power_of_n = "" if exponent is None else f', n<tspan dy="-5" font-size="9">{exponent:.1f}</tspan>'
    name = escape(title) + power_of_n
    parts = [f'<text x="{_LEFT}" y="34" font-size="12">{name}</text>']
    for power in range(round(axes.least_y), round(axes.most_y) + 1):
        y = axes.y(10.0**power)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="small" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    parts += [
        f'<text class="small" x="{axes.x(nodes):.1f}" y="{bottom + 15}" text-anchor="middle">{nodes:,}</text>'
        for nodes in sorted({nodes for points in curves.values() for nodes, _ in points})
    ]
    if curves["now"]:
        (first, seconds), last = curves["now"][0], curves["now"][-1][0]
        end = min(seconds * last / first, 10.0**axes.most_y)
        line = [(first, seconds), (first * end / seconds, end)]
        parts.append(f'<path class="linear" d="{_path(axes, line)}"/>')
    for kind, dot in (("before", "olddot"), ("now", "dot")):
        if points := curves[kind]:
            parts.append(f'<path class="line {kind}" d="{_path(axes, points)}"/>')
        parts += [
            f'<circle class="{dot}" cx="{axes.x(nodes):.1f}" cy="{axes.y(seconds):.1f}" r="3"/>'
            for nodes, seconds in points
        ]
    return "".join(parts)


def _path(axes: _Axes, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{axes.x(nodes):.1f} {axes.y(seconds):.1f}" for nodes, seconds in points)
