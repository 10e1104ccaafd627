# ruff: noqa: ARG003, ARG004, PYI034  # signatures are all that is looked at
"""Callables of many kinds, imported by a test and read by the checks: both must see the same."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

T = TypeVar("T")
Types = Any


def plain(first: int, /, second: str = "", *rest: int, third: bool, fourth: int = 4, **more: float) -> None:
    """Take arguments of every kind."""


@overload
def several(first: int) -> int: ...
@overload
def several(first: str, second: int = 0) -> str: ...
def several(first: Any, second: int = 0) -> Any:
    """Take what both overloads take."""
    return first, second


@functools.cache
def cached(first: int, second: int = 2) -> int:
    """Be cached."""
    return first + second


nameless = lambda first, second=1: (first, second)  # noqa: E731
once = partial(plain, 1, third=True)
twice = partial(once, "2", fourth=5)
in_the_middle = partial(several, second=1)


class Grand:
    """Has a constructor that a diamond must not take."""

    def __init__(self, old: int) -> None: ...

    @classmethod
    def made(cls, size: int, *, deep: bool = False) -> Grand:
        """Make one."""
        return cls(size)

    @staticmethod
    def helped(size: int) -> int:
        """Return the size."""
        return size


class Left(Grand):
    """Adds nothing."""


class Right(Grand):
    """Takes something else."""

    def __init__(self, new: str, *rest: int) -> None: ...


class Diamond(Left, Right):
    """Takes what the class on the right takes."""


class Container(Generic[T]):
    """Takes nothing."""


class Boxed(Container[int]):
    """Takes one."""

    def __new__(cls, value: int, scale: float = 1.0) -> Boxed:
        """Make one."""
        return super().__new__(cls)


class Point(NamedTuple):
    """Has fields."""

    x: int
    y: int = 0


class Named(Point):
    """Inherits a named tuple's."""


@dataclass
class Base:
    """A dataclass."""

    first: int
    second: list[int] = field(default_factory=list)
    hidden: int = field(init=False, default=3)
    shared: ClassVar[int] = 5


@dataclass(frozen=True)
class Free:
    """A dataclass without bases."""

    _: KW_ONLY
    named: int
    also: InitVar[int] = 2


@dataclass
class Derived(Base):
    """Inherits fields, changes a default and adds some."""

    first: int = 1
    third: str = ""
    fourth: int = field(kw_only=True)


@dataclass(kw_only=True)
class Named2(Base):
    """Adds fields by name only."""

    fifth: int


class Defaults:
    """Gives a field its default."""

    depth = 7


@dataclass
class WithDefault(Defaults):
    """Has a field whose default stands in a base that is no dataclass."""

    depth: int


class Plain(Derived):
    """Inherits a dataclass's constructor."""


@dataclass
class Own:
    """Writes its own constructor."""

    value: int

    def __init__(self, other: int) -> None:
        self.value = other


@dataclass(init=False)
class NoInit(Grand):
    """Inherits its constructor."""

    value: int


alias = Diamond
half = partial(Right, "new")

ENTRIES = [
    "plain", "several", "cached", "nameless", "once", "twice", "in_the_middle", "Grand", "Grand.made", "Grand.helped", "Left",
    "Left.made", "Right", "Diamond", "Diamond.made", "Container", "Boxed", "Point", "Named", "Base", "Free", "Derived", "Named2",
    "WithDefault", "Plain", "Own", "NoInit", "alias", "half",
]  # fmt: skip
