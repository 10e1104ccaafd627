"""What was most likely meant by a value that is not right (floor 1, pure)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.spec.findings.showing import dotted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.spec.positions import KeyPath

_UNITS = (
    "steps", "epochs", "samples", "min", "h", "d", "s", "step", "epoch", "sample", "minutes", "hours", "seconds", "days",
)  # fmt: skip


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the one of *known* that *word* is most likely a slip of; none if none is near."""
    import difflib  # most files hold no mistake

    return difflib.get_close_matches(word, list(known), 1)


def is_table(value: object) -> bool:
    """Return whether a value is a table, or an array of them."""
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def type_help(path: KeyPath, value: object, expected: str) -> str | None:
    """Return how a value of the wrong type is written rightly."""
    key = path[-1]
    if is_table(value) and expected == "a table":
        return f"write [{dotted(path)}], not [[{dotted(path)}]]"
    if expected == "a table":
        return (
            f"write [{key}] on a line of its own, its keys below"
            if len(path) == 1
            else f"write {key} = {{ ... }}"
        )
    if isinstance(value, int | float) and "unit" in expected:
        return f'with a unit: {key} = "{value} steps" or {key} = "{value} min"'
    if not isinstance(value, str):
        return None
    if value.lower() in {"true", "false", "yes", "no"} and "true or false" in expected:
        return "write true or false, without quotes"
    if value.replace("_", "").lstrip("+-").isdigit() and "number" in expected:
        return f"without quotes: {key} = {value}"
    return None


def entry_help(value: object) -> str | None:
    """Return the entry point that a dotted name was meant to be."""
    if isinstance(value, str) and ":" not in value and "." in value:
        module, _, name = value.rpartition(".")
        return f'did you mean "{module}:{name}"? A colon stands between module and name'
    return None


def unit_help(value: object) -> str | None:
    """Return the interval or size that was meant, where its unit is missing or mistyped."""
    if not isinstance(value, str):
        return None
    found = re.fullmatch(r"([0-9][0-9._]*)\s*([A-Za-z]*)", value.strip())
    if found is None:
        return None
    number, unit = found.groups()
    if not unit:
        return f'add a unit: "{number} steps" or "{number} min"'
    if unit not in _UNITS and (near := nearest(unit, _UNITS)):
        return f'did you mean "{number} {near[0]}"?'
    return None


def name_help(value: object, expected: str) -> str | None:
    """Return the nearest name of allowed characters."""
    if not isinstance(value, str) or not expected.startswith("a name of"):
        return None
    others, between = ("._-", "-") if '"-"' in expected else ("_", "_")
    near = re.sub(rf"[^A-Za-z0-9{re.escape(others)}]+", between, value).strip(between)[:100]
    is_good = near[:1].isalpha() or (near[:1].isdigit() and between == "-")
    return f'did you mean "{near}"?' if is_good and near != value else None


def listing(names: list[str], prefix: str = "") -> str | None:
    """Return the names there are, shortened; None if there are none."""
    if not names:
        return None
    shown = ", ".join(f"{prefix}{name}" for name in names[:8])
    return f"there are: {shown}{', ...' if len(names) > 8 else ''}"
