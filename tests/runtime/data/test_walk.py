"""Content of samples, whatever holds it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from elasticflow.runtime.data.walk import Content, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Picture:
    """A sample as a dataclass."""

    pixels: torch.Tensor
    label: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    """A sample without a `__dict__`."""

    pixels: torch.Tensor


class Plain:
    """A sample as PyG's `Data` is built: a store inside, which refers to its owner."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.store: dict[str, Any] = {"x": pixels, "owner": weakref.ref(self), "again": self}


class Record(BaseModel):
    """A sample as pydantic makes it."""

    label: int


class Pair(NamedTuple):
    """A sample as a named tuple."""

    first: Any
    second: Any


class Tagged(dict[str, Any]):
    """A dict with an attribute."""

    tag = 0


class Color(Enum):
    """A member is an object."""

    RED, BLUE = 0, 1


def _tagged(number: int) -> Tagged:
    made = Tagged(x=1)
    made.tag = number
    return made


FORMS: dict[str, Any] = {
    "dataclass": lambda n: Picture(torch.full((2,), float(n))),
    "slots": lambda n: Slotted(torch.full((2,), float(n))),
    "attributes and a cycle": lambda n: Plain(torch.full((2,), float(n))),
    "pydantic": lambda n: Record(label=n),
    "named tuple of a dataclass": lambda n: Pair(1, Picture(torch.zeros(2), n)),
    "enum": Color,
    "set": lambda n: {"a", "b", f"c{n}"},
    "deque": lambda n: deque([1, n]),
    "path": lambda n: Path(f"/data/{n}"),
    "fraction": lambda n: Fraction(1, n + 2),
    "dict with an attribute": _tagged,
    "sparse": lambda n: torch.tensor([[0.0, n + 1.0]]).to_sparse(),
    "sparse in an object": lambda n: Picture(torch.tensor([[0.0, n + 1.0]]).to_sparse()),
    "class of arrays in an object": lambda n: Pair((np.float32, np.float64)[n], Picture(torch.zeros(1))),
    "masked array": lambda n: np.ma.masked_array([1, 2], [n, 1]),
    "array of objects": lambda n: np.array([Picture(torch.zeros(1), n), None], dtype=object),
    "partial": lambda n: partial(max, n),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=list(FORMS))
def test_objects_count_by_what_they_hold(make: Any) -> None:
    """Equal content has one digest, other content another, and nothing is said to be unseen."""
    digest, unseen = digest_of((make(0), 7))
    assert not unseen
    assert digest == digest_of((make(0), 7))[0]
    assert digest != digest_of((make(1), 7))[0]


def test_plain_data_has_one_digest() -> None:
    """An object has two; the plain one does not see inside of it."""

    def digests(value: Any) -> tuple[bytes, bytes]:
        content = Content()
        content.add(value)
        return content.plain_digest(), content.digest()

    plain, whole = digests({"x": [torch.zeros(2), 1, "a", None, b"c"]})
    assert plain == whole
    one, other = (digests([Picture(torch.zeros(1), number), 3]) for number in (1, 2))
    assert one[0] == other[0] != one[1]
    assert one[1] != other[1]


class Closed:
    """An object that cannot be pickled, with attributes beside."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("cannot pickle")


def iter_numbers() -> Iterator[int]:
    """Yield a number."""
    yield 1


def test_numbers_in_a_row_are_told_apart() -> None:
    """Rows of small numbers, as of a table: (1, 23) is not (12, 3)."""
    rows = [(1, 23), (12, 3), (123, ""), ([1], 23), ([12], 3)]
    assert len(rows) == len({digest_of(row)[0] for row in rows})


def test_what_cannot_be_looked_into_is_named() -> None:
    """Its attributes are seen all the same; a lock holds nothing."""
    digest, unseen = digest_of([Closed(1)])
    assert list(unseen) == [f"{__name__}.Closed"]
    assert digest != digest_of([Closed(2)])[0]
    assert list(digest_of([iter_numbers()])[1]) == ["generator"]
    assert list(digest_of([lambda: 1])[1]) == ["function"]
    assert not digest_of([Picture(torch.zeros(1)), threading.Lock()])[1]


def test_a_walk_ends() -> None:
    """An object may hold a whole dataset, or a chain without end."""
    endless: list[Any] = []
    endless.append(endless)
    for held in (list(range(10**5)), np.zeros(10**8, np.int8), endless):
        holder = Closed(0)
        holder.number = held  # type: ignore[assignment]
        assert any("parts of a sample" in name for name in digest_of(holder)[1])
