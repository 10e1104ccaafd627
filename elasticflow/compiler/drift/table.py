"""Differences as a table for people, grouped by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.system.redaction import mask_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.compiler.drift.compare import Difference
    from elasticflow.protocol.key_weights import Weight

WEIGHTS: dict[Weight, str] = {
    "corrupting": "would corrupt the run",
    "trajectory": "changes the trajectory",
    "harmless": "harmless",
}
_WIDEST_KEY, _WIDEST_CHANGE, _LONGEST_VALUE = 44, 44, 60


def _plain(text: str, _: Weight) -> str:
    return text


def lines_of(
    differences: Sequence[Difference], paint: Callable[[str, Weight], str] = _plain, indent: str = "  "
) -> Iterator[str]:
    """Yield the table's lines, the weightiest group first: key, old -> new, reason.

    Args:
        differences: In the order that they are shown within a group.
        paint: Returns a group's head in the colour of its weight.
        indent: Before each line.
    """
    rows = [(each, each.key, change(each)) for each in differences]
    keys = min(max((len(key) for _, key, _ in rows), default=0), _WIDEST_KEY)
    changes = min(max((len(text) for *_, text in rows), default=0), _WIDEST_CHANGE)
    for weight, title in WEIGHTS.items():
        group = [row for row in rows if row[0].weight == weight]
        if group:
            yield f"{indent}{paint(title, weight)}"
        for each, key, text in group:
            yield f"{indent}  {key:<{keys}}  {text:<{changes}}  {each.reason}"


def change(difference: Difference) -> str:
    """Return `0.1 -> 0.2`; a value that is not there is `-`."""
    return f"{value(difference.old)} -> {value(difference.new)}"


def value(content: Any) -> str:
    """Return a value as short as a table takes it."""
    match content:
        case None | []:
            return "-"
        case str():
            text = mask_url(content)
        case list():
            text = ", ".join(map(str, content))
        case _:
            text = repr(content)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
