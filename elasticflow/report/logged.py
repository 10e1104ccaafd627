"""Prepares the logs of hooks for a report: numbers as curves, texts and images unchanged, the newest first."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.observe.curves import curve_of
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.observe.curves import Curve
    from elasticflow.run_folder import RunFolder

Point = dict[str, Any]
_MOST_SHOWN = 12
"""Most texts or images of one name; the first and the newest are among them."""
_MOST_BYTES = 1_500_000
"""Most bytes of all images in a report."""
_MOST_CHARACTERS = 20_000
"""Most characters of one text."""
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Shown:
    """A text, or an image as a data URL."""

    step: int
    rank: int
    value: str


@dataclass(frozen=True)
class Logged:
    """Texts or images that a hook logged under one name.

    Attributes:
        shown: The texts or images to show, the newest first.
        count: Number of all logged texts or images.
    """

    name: str
    kind: Literal["text", "image"]
    shown: Sequence[Shown]
    count: int


def scalars_of(points: Iterable[Point]) -> list[Curve]:
    """Return the numbers that rank 0, or else the first rank with any, has logged, as curves by name."""
    by_name = _by_name(points, "scalar")
    curves = []
    for name, found in by_name.items():
        rank = min(point["rank"] for point in found)
        values = [
            (point["step"], point["generation"], _number(point)) for point in found if point["rank"] == rank
        ]
        curves.append(curve_of(name, values))
    return curves


def logged_in(folder: RunFolder, points: Sequence[Point]) -> list[Logged]:
    """Return texts and images of a run; images that are missing or not readable are left out."""
    found = [
        Logged(name, "text", [_text(point) for point in _chosen(of_name)], len(of_name))
        for name, of_name in _by_name(points, "text").items()
    ]
    left = _MOST_BYTES
    for name, of_name in _by_name(points, "image").items():
        shown = []
        for point in _chosen(of_name):
            data = _image(folder, point)
            if data is not None and len(data) <= left:
                left -= len(data)
                url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
                shown.append(Shown(point["step"], point["rank"], url))
        found.append(Logged(name, "image", shown, len(of_name)))
    return found


def _by_name(points: Iterable[Point], kind: str) -> Mapping[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.get("kind") == kind:
            found.setdefault(point["name"], []).append(point)
    return found


def _chosen(points: Sequence[Point]) -> list[Point]:
    """Return some of the points, evenly over all, the newest first."""
    last = len(points) - 1
    count = min(len(points), _MOST_SHOWN)
    return [points[round(last * i / max(1, count - 1))] for i in reversed(range(count))]


def _number(point: Point) -> float | None:
    value = point.get("value")
    return float(value) if isinstance(value, int | float) else None


def _text(point: Point) -> Shown:
    text = str(point.get("value"))
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return Shown(point["step"], point["rank"], "\n".join(map(printable, cut.splitlines())))


def _image(folder: RunFolder, point: Point) -> bytes | None:
    path = folder.path / str(point.get("value"))
    try:
        if not path.resolve().is_relative_to(folder.path.resolve()):
            return None
        data = path.read_bytes()
    except (OSError, ValueError):
        return None
    return data if data.startswith(_PNG) else None
