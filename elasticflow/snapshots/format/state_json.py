"""What state.json says, as Python values with references to tensors; needs no torch.

The marks are those of `runtime/state/codec.py`, which writes them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import STATE_FILE, DamagedSnapshotError
from elasticflow.system import records
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elasticflow.snapshots.format.manifest import TensorPlace

PARAMETERS = "parameters"  # beside the parts: which parameter each number of the optimizer's stands for
_DEEPEST = 500  # of values in values: whoever reads them calls itself for each


@dataclass(frozen=True)
class Ref:
    """A stored tensor, or one element of it.

    Attributes:
        key: The tensor's key in the manifest.
        index: Which element of the packed vector; None: all of the tensor.
    """

    key: str
    index: int | None = None


def parse(data: bytes, tensors: Mapping[str, TensorPlace]) -> dict[str, Any]:
    """Return state.json's content; what it says can be decoded, and every tensor it names is among *tensors*.

    Raises:
        DamagedSnapshotError: it cannot be what was written.
    """
    try:
        content = records.parse(data)
    except records.BadJsonError as error:
        raise DamagedSnapshotError(f"{STATE_FILE} {error}") from None
    position, parts = content.get("position"), content.get("state")
    if not isinstance(position, dict) or not all(map(_is_place, position.values())):
        raise DamagedSnapshotError(f"{STATE_FILE} tells no position")
    if not isinstance(parts, dict) or not _are_names(parts.get(PARAMETERS)):
        raise DamagedSnapshotError(f"{STATE_FILE} holds no state")
    waiting = [(value, 1) for name, value in parts.items() if name != PARAMETERS]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise DamagedSnapshotError(f"{STATE_FILE} is nested too deeply")
        if isinstance(value, dict | list):
            waiting += [(inner, depth + 1) for inner in _values_in(value, tensors)]
    return content


def _values_in(value: dict[str, Any] | list[Any], tensors: Mapping[str, TensorPlace]) -> list[Any]:
    """Return the values right inside *value*; a mark has the content that belongs to it."""
    if isinstance(value, list):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
        return list(value.values())
    content = value[mark]
    match mark, content:
        case "$tensor", str() if content in tensors:
            return []
        case "$scalar", [str(key), int(index)] if key in tensors and not isinstance(index, bool):
            if 0 <= index < math.prod(tensors[key].shape):
                return []
        case "$float", "inf" | "-inf" | "nan":
            return []
        case "$tuple", list():
            return content
        case (("$counter" | "$dict"), list()) if all(map(_is_pair, content)):
            return [item for _, item in content]
        case (("$tensor" | "$scalar" | "$float" | "$tuple" | "$counter" | "$dict"), _):
            pass
        case _:
            return []  # of another version: `decode` names it
    raise DamagedSnapshotError(f"{STATE_FILE} holds {printable(value)}, which nothing writes")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_key(value[0])


def _is_key(value: Any, depth: int = 0) -> bool:
    match value:
        case {"$tuple": list(items)} if len(value) == 1 and depth < _DEEPEST:
            return all(_is_key(item, depth + 1) for item in items)
        case {"$float": "inf" | "-inf" | "nan"}:
            return len(value) == 1
        case _:
            return not isinstance(value, dict | list)


def _is_place(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def _are_names(groups: Any) -> bool:
    """Return whether these are the names of parameters, group by group, of one optimizer or of each; or none were told."""
    if groups is None:
        return True
    if isinstance(groups, dict):
        return all(isinstance(each, list) and _are_names(each) for each in groups.values())
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(name is None or isinstance(name, str) for name in group)
        for group in groups
    )


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
