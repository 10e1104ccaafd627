"""What a person types for an argument, turned into the value that it takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import tomli

from elasticflow.scaffold.arguments import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.scaffold.arguments import Takes, ValueType


def coerced(takes: Takes, text: str) -> Any:
    """Return the value that *text*, as a person types it, is for such an argument.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    if takes.choices:
        for each in takes.choices:
            if text in {str(each), repr(each), f'"{each}"', str(each).lower()}:
                return each
        raise ValueError(text)
    if takes.is_guess and text[:1] in {'"', "'", "[", "{"} and "str" not in takes.types:
        return _any(text)
    for name in takes.types:
        try:
            return _items(text, takes.item or ANY) if name == "list" else _READERS[name](text)
        except ValueError:
            continue
    raise ValueError(text)


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(text)
    return value


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    word = text.lower()
    if word not in {"true", "false", "yes", "no", "y", "n"}:
        raise ValueError(text)
    return word[0] in "ty"


def _text(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _toml(text: str) -> Any:
    return tomli.loads(f"v = {text}")["v"]  # its errors are ValueErrors


def _any(text: str) -> Any:
    for read in (_whole, _real, _toml):
        try:
            return read(text)
        except ValueError:
            continue
    return _text(text)


def _items(text: str, item: Takes) -> list[Any]:
    if text.startswith("["):
        values = _toml(text)
        if not isinstance(values, list):
            raise ValueError(text)
        return [coerced(item, each if isinstance(each, str) else str(each).lower()) for each in values]
    return [coerced(item, each) for each in text.split(",")]


def _table(text: str) -> dict[str, Any]:
    value = _toml(text)
    if isinstance(value, dict):
        return value
    raise ValueError(text)


def _never(text: str) -> Any:
    raise ValueError(text)


_READERS: dict[ValueType, Callable[[str], Any]] = {
    "int": _whole,
    "float": _real,
    "bool": _flag,
    "str": _text,
    "table": _table,
    "any": _any,
    "object": _never,
}
