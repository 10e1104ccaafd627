"""Frozen dataclasses as JSON: the form in which processes send one another messages.

A dataclass is an object of its fields, a NamedTuple an array; a class with `to_json` and `from_json` of its own is left to
these. Incoming fields are checked against their annotations: a malformed message fails on arrival.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_TAG = "type"


def to_json(record: object, *, allow_nan: bool = True) -> str:
    """Return *record*, a dataclass, as one line of JSON; nothing of it is copied first.

    Args:
        record: Holds JSON's own types, dataclasses and NamedTuples.
        allow_nan: Write infinities and NaN in the way that Python reads; otherwise they raise ValueError.
    """
    return json.dumps(record, default=_content, allow_nan=allow_nan)


def from_json(record_class: type[T], content: object) -> T:
    """Return the *record_class* that `to_json` turned into *content*, which is parsed already.

    Raises:
        ValueError: a field is missing, unknown or of another type; shows no value, which may be a secret.
    """
    record: T = _build(record_class, content)
    return record


class MessageCodec(Generic[T]):
    """Messages of several classes as JSON objects, in which the key `type` names the class."""

    def __init__(self, *classes: type[T]) -> None:
        self._classes = {message_class.__name__: message_class for message_class in classes}

    def encode(self, message: T, *, allow_nan: bool = True) -> str:
        """Return *message* as one line of JSON; see `to_json`."""
        return to_json({_TAG: type(message).__name__, **vars(message)}, allow_nan=allow_nan)

    def decode(self, text: bytes | str) -> T:
        """Return the message that `encode` turned into *text*.

        Raises:
            ValueError: *text* is not JSON, or not one of the messages.
        """
        return self.from_json(json.loads(text))

    def from_json(self, content: object) -> T:
        """Return the message that `encode` turned into *content*, which is parsed already.

        Raises:
            ValueError: *content* is not one of the messages.
        """
        values: dict[str, Any] = dict(_build(dict[str, Any], content))
        message_class = self._classes.get(str(values.pop(_TAG, None)))
        if message_class is None:
            raise ValueError(f"{_TAG} is none of {', '.join(self._classes)}")
        return from_json(message_class, values)


def _content(record: Any) -> Any:
    return record.to_json() if hasattr(record, "to_json") else vars(record)


def _build(annotation: Any, value: Any) -> Any:
    """Return the object of type *annotation* that JSON has as *value*."""
    if annotation is Any:
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        for member in arguments:
            with suppress(ValueError):
                return _build(member, value)
    elif hasattr(annotation, "from_json"):
        return annotation.from_json(value)
    elif type(value) is list and (origin in (list, tuple) or hasattr(annotation, "_make")):
        return _build_array(annotation, value)
    elif type(value) is dict and origin is dict:
        return value if arguments[1] is Any else {key: _build(arguments[1], value[key]) for key in value}
    elif type(value) is dict and is_dataclass(annotation):
        return _build_record(annotation, value)
    elif type(value) in ((int, float) if annotation is float else (annotation,)) or value in arguments:
        return value  # as it is, or one of those of a Literal
    raise ValueError(f"{type(value).__name__} instead of {annotation}")


def _build_array(annotation: Any, values: list[Any]) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    make = annotation._make if origin is None else origin  # a NamedTuple, or list and tuple
    if origin is None:
        arguments = tuple(_types(annotation).values())
    elif origin is list or arguments[-1] is ...:
        arguments = arguments[:1] * len(values)
    return make([_build(*pair) for pair in zip(arguments, values, strict=True)])


def _build_record(record_class: Any, content: dict[str, Any]) -> Any:
    types, values = _types(record_class), {}
    if wrong := (content.keys() - types.keys()) | (_required(record_class) - content.keys()):
        raise ValueError(f"{record_class.__name__}: unknown or missing: {', '.join(sorted(wrong))}")
    for name, value in content.items():
        try:
            values[name] = _build(types[name], value)
        except ValueError as error:
            raise ValueError(f"{record_class.__name__}.{name}: {error}") from None
    return record_class(**values)


@cache
def _types(record_class: Any) -> dict[str, Any]:
    return get_type_hints(record_class)


@cache
def _required(record_class: Any) -> frozenset[str]:
    return frozenset(
        field.name
        for field in fields(record_class)
        if field.default is MISSING and field.default_factory is MISSING
    )
