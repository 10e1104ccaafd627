"""What state.json says, as Python values with references to tensors; needs no torch (floor 1, pure).

The marks are those of `runtime/tree.py`, which writes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Ref:
    """A stored tensor, or one element of it.

    Attributes:
        key: The tensor's key in the manifest.
        index: Which element of the packed vector; None: all of the tensor.
    """

    key: str
    index: int | None = None


def decode(value: Any) -> Any:
    """Return what was written as *value*, each tensor as a Ref.

    Raises:
        SnapshotError: it was written by another version.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    content = value[mark]
    match mark:
        case "$tensor":
            return Ref(content)
        case "$scalar":
            return Ref(*content)
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(decode(item) for item in content)
        case "$counter":
            return Counter({decode(key): decode(count) for key, count in content})
        case "$dict":
            return {decode(key): decode(item) for key, item in content}
        case _:
            raise SnapshotError(f"the snapshot holds a value marked {mark}, which this version does not know")


def replace_refs(value: Any, by: Callable[[Ref], Any]) -> Any:
    """Return *value* with every Ref replaced."""
    match value:
        case Ref():
            return by(value)
        case Counter():
            return value
        case dict():
            return {key: replace_refs(item, by) for key, item in value.items()}
        case list() | tuple():
            return type(value)(replace_refs(item, by) for item in value)
        case _:
            return value


def refs(value: Any, path: str = "") -> Iterator[tuple[str, Ref]]:
    """Yield every Ref in *value* with the keys that lead to it, joined by `/`."""
    match value:
        case Ref():
            yield path, value
        case dict():
            for key, item in value.items():
                yield from refs(item, f"{path}/{key}" if path else str(key))
        case list() | tuple():
            for number, item in enumerate(value):
                yield from refs(item, f"{path}/{number}" if path else str(number))
        case _:
            return
