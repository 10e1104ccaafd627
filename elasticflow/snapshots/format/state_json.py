"""state.json as Python values with references to tensors; needs no torch.

`runtime/state/codec.py` writes it. A value that JSON lacks is an object with a `StateMark` as its only key.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import STATE_FILE, DamagedSnapshotError
from elasticflow.system import records
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elasticflow.snapshots.format.pieces import WholeTensor

# Key beside the parts: the names of the parameters that numbers in the optimizer's state stand for.
PARAMETERS = "parameters"
# Levels of values inside values; `decode` calls itself at each level.
_DEEPEST = 500


class StateMark:
    """The only key of an object that stands for a value that JSON lacks.

    Attributes:
        TENSOR: A stored tensor, by its key.
        SCALAR: One element of a stored vector: the vector's key and the element's index.
        FLOAT: A number that JSON lacks: "inf", "-inf", "nan".
        TUPLE: A tuple, as a list.
        COUNTER: A `collections.Counter`, as pairs.
        ORDERED: A `collections.OrderedDict`, as pairs.
        DICT: A dict with a key that is no text, or looks like a mark, as pairs.
    """

    TENSOR: Final = "$tensor"
    SCALAR: Final = "$scalar"
    FLOAT: Final = "$float"
    TUPLE: Final = "$tuple"
    COUNTER: Final = "$counter"
    ORDERED: Final = "$ordered"
    DICT: Final = "$dict"


_DICTS: dict[str, type[dict[Any, Any]]] = {
    StateMark.COUNTER: Counter,
    StateMark.ORDERED: OrderedDict,
    StateMark.DICT: dict,
}
_MARKS = frozenset({*_DICTS, StateMark.TENSOR, StateMark.SCALAR, StateMark.FLOAT, StateMark.TUPLE})


class UnknownMarkError(SnapshotError):
    """The snapshot holds a value that only another version of elasticflow knows."""

    def __init__(self, mark: str) -> None:
        super().__init__(f"the snapshot holds a value marked {mark}, which this version does not know")


def mark_of(value: dict[str, Any]) -> str | None:
    """Return the mark of an object that stands for another value, or None if it stands for itself."""
    if len(value) != 1 or not (key := next(iter(value))).startswith("$"):
        return None
    return key


@dataclass(frozen=True)
class Ref:
    """A stored tensor, or one element of it.

    Attributes:
        key: The tensor's key in the manifest.
        index: Index of the element in a packed vector; None: the whole tensor.
    """

    key: str
    index: int | None = None


def parse(data: bytes, tensors: Mapping[str, WholeTensor]) -> dict[str, Any]:
    """Return the content of state.json; it can be decoded, and every tensor that it names is among *tensors*.

    Raises:
        DamagedSnapshotError: *data* cannot be what was written.
    """
    try:
        content = records.parse(data)
    except records.BadJsonError as error:
        raise DamagedSnapshotError(f"{STATE_FILE} {error}") from None
    position, parts = content.get("position"), content.get("state")
    if not isinstance(position, dict) or not all(map(_is_position_value, position.values())):
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


def _values_in(value: dict[str, Any] | list[Any], tensors: Mapping[str, WholeTensor]) -> list[Any]:
    """Return the values directly inside *value*; raise DamagedSnapshotError if a mark has the wrong content."""
    if isinstance(value, list):
        return value
    if (mark := mark_of(value)) is None:
        return list(value.values())
    content = value[mark]
    match mark, content:
        case StateMark.TENSOR, str() if content in tensors:
            return []
        case StateMark.SCALAR, [str(key), int(index)] if key in tensors and not isinstance(index, bool):
            if 0 <= index < math.prod(tensors[key].shape):
                return []
        case StateMark.FLOAT, "inf" | "-inf" | "nan":
            return []
        case StateMark.TUPLE, list():
            return content
        case _, list() if mark in _DICTS and all(map(_is_pair, content)):
            return [item for _, item in content]
        case _:
            # A mark of another version: `decode` names it.
            if mark not in _MARKS:
                return []
    raise DamagedSnapshotError(f"{STATE_FILE} holds {printable(value)}, which nothing writes")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_key(value[0])


def _is_key(value: Any, depth: int = 0) -> bool:
    match value:
        case {StateMark.TUPLE: list(items)} if len(value) == 1 and depth < _DEEPEST:
            return all(_is_key(item, depth + 1) for item in items)
        case {StateMark.FLOAT: "inf" | "-inf" | "nan"}:
            return len(value) == 1
        case _:
            return not isinstance(value, dict | list)


def _is_position_value(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def _are_names(groups: Any) -> bool:
    """Return whether these are names of parameters by group, of one optimizer or of each of several, or None."""
    if groups is None:
        return True
    if isinstance(groups, dict):
        return all(isinstance(names, list) and _are_names(names) for names in groups.values())
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(name is None or isinstance(name, str) for name in group)
        for group in groups
    )


def decode(value: Any, tensor: Callable[[Ref], Any] = lambda ref: ref) -> Any:
    """Return the Python value that *value* stands for, each tensor as what *tensor* returns for its Ref.

    Raises:
        UnknownMarkError: another version wrote the value.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if (mark := mark_of(value)) is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    content = value[mark]
    match mark:
        case StateMark.TENSOR:
            return tensor(Ref(content))
        case StateMark.SCALAR:
            return tensor(Ref(*content))
        case StateMark.FLOAT:
            return float(content)
        case StateMark.TUPLE:
            return tuple(decode(item, tensor) for item in content)
        case _ if mark in _DICTS:
            return _DICTS[mark]({decode(key): decode(item, tensor) for key, item in content})
        case _:
            raise UnknownMarkError(mark)


def replace_refs(value: Any, by: Callable[[Ref], Any]) -> Any:
    """Return *value* with every Ref replaced by the result of *by*."""
    match value:
        case Ref():
            return by(value)
        case Counter():
            return value
        case dict():
            return type(value)({key: replace_refs(item, by) for key, item in value.items()})
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
