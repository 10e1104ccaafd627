"""Dataclasses as JSON: what fits comes back as it was, what does not is refused where it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from elasticflow.protocol.json_codec import MessageCodec, from_json, to_json


class Point(NamedTuple):
    """An array in JSON."""

    x: int
    y: int


@dataclass(frozen=True)
class Inner:
    """An object in another one."""

    name: str
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Outer:
    """One field of each kind."""

    kind: Literal["a", "b"]
    seconds: float
    inner: Inner | None
    pairs: tuple[tuple[str, int], ...]
    words: list[str]
    numbers: dict[str, int]
    anything: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Other:
    """A message without fields."""


WHOLE = Outer("a", 0.5, Inner("in", (Point(1, 2),)), (("p", 1),), ["w"], {"n": 1}, {"deep": [None, {}]})
CODEC: MessageCodec[Outer | Other] = MessageCodec(Outer, Other)


@pytest.mark.parametrize("record", [WHOLE, Outer("b", 3, None, (), [], {})])
def test_record_comes_back_as_it_was(record: Outer) -> None:
    """Nested ones too; a whole number is a float; what has a default may be left out."""
    content = json.loads(to_json(record))

    assert record == from_json(Outer, content)
    if not record.anything:
        del content["anything"]
        assert record == from_json(Outer, content)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "c"}, "Outer.kind: str instead of "),
        ({"seconds": True}, "Outer.seconds: bool instead of "),
        ({"inner": {"name": 1}}, "Outer.inner: dict instead of "),
        ({"pairs": [["p"]]}, "Outer.pairs: "),
        ({"words": [1]}, "Outer.words: int instead of "),
        ({"words": {}}, "Outer.words: dict instead of "),
        ({"numbers": {"n": "secret"}}, "Outer.numbers: str instead of "),
        ({"more": 1}, "Outer: unknown or missing: more"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    """Says which field; values are not shown."""
    content = json.loads(to_json(WHOLE)) | change
    with pytest.raises(ValueError, match=told) as refused:
        from_json(Outer, content)

    assert "secret" not in str(refused.value)


def test_a_missing_field_is_refused() -> None:
    """One that has no default."""
    content = json.loads(to_json(WHOLE))
    del content["words"]
    with pytest.raises(ValueError, match="Outer: unknown or missing: words"):
        from_json(Outer, content)


@pytest.mark.parametrize(
    "text", ["", "[]", '"Outer"', "{}", '{"type": "Inner"}', '{"type": ["Outer"]}', b"\xff"]
)
def test_something_else_is_no_message(text: str | bytes) -> None:
    """No JSON, no object, or none of the names."""
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own errors are among them
        CODEC.decode(text)


def test_messages_are_told_apart_by_their_tag() -> None:
    """One without fields is its tag alone."""
    assert '{"type": "Other"}' == CODEC.encode(Other())
    for message in (WHOLE, Other()):
        assert message == CODEC.decode(CODEC.encode(message))


def test_infinities_are_refused_where_they_must_not_be() -> None:
    """JSON itself has none."""
    with pytest.raises(ValueError, match="Out of range float values"):
        to_json(Outer("a", float("inf"), None, (), [], {}), allow_nan=False)
