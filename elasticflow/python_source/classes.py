"""The classes that a class inherits from, in Python's order of method lookup, and their methods."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.bindings import origin
from elasticflow.python_source.modules import CannotTellError, Definition, UnresolvedError
from elasticflow.python_source.syntax import dotted_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.python_source.modules import DottedNames

# Bases without any name that a check looks for.
_EMPTY = {"builtins.object", "abc.ABC"} | {
    f"{home}.{name}" for home in ("typing", "typing_extensions") for name in ("Generic", "Protocol", "NamedTuple")
}  # fmt: skip
_NAMED_TUPLES = {"typing.NamedTuple", "typing_extensions.NamedTuple"}
_MOST_LEVELS = 20
_CIRCLE = "classes inherit in a circle"


def is_named_tuple(definition: Definition) -> bool:
    """Return whether the class is defined as `class Name(NamedTuple)`."""
    assert isinstance(definition.node, ast.ClassDef)
    return any(origin(definition.module, base) in _NAMED_TUPLES for base in definition.node.bases)


def base_names(definition: Definition) -> list[str]:
    """Return the names of a class's bases: by their imports if these show them, else as written; "" for a call."""
    assert isinstance(definition.node, ast.ClassDef)
    return [origin(definition.module, base) or ".".join(dotted_names(base)) for base in definition.node.bases]


def methods_of(definition: Definition) -> set[str]:
    """Return the names that a class's own body may give to functions: by `def`, by assignment, also under a condition."""
    assert isinstance(definition.node, ast.ClassDef)
    return {name for each in definition.node.body for name in bound_in(each)}


def bound_in(member: ast.stmt) -> set[str]:
    """Return every name that a statement of a class body may bind."""
    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {member.name}
    return {getattr(each, "id", getattr(each, "name", "")) or "" for each in ast.walk(member)}


def classes_of(
    definition: Definition,
    resolver: DottedNames,
    *,
    is_left_out: Callable[[str], bool] = lambda _: False,
    skips_unreadable: bool = False,
) -> Iterator[Definition]:
    """Yield a class and all its bases in the order of `__mro__`, except bases that define nothing.

    As long as each class has only one base, a base is read on demand: a caller that stops early does not read the
    remaining bases, which may lie in a large package or be missing.

    Args:
        is_left_out: True for the name of a base, as in `base_names`, that is not to be read.
        skips_unreadable: Leave out bases that cannot be read.

    Raises:
        UnresolvedError: a base does not exist or cannot be read, or the bases have no common order.
    """
    return _Walk(resolver, is_left_out, skips_unreadable).classes(definition)


class _Walk(NamedTuple):
    resolver: DottedNames
    is_left_out: Callable[[str], bool]
    skips_unreadable: bool

    def classes(self, definition: Definition, level: int = 0) -> Iterator[Definition]:
        bases = [definition]
        while len(bases) == 1:
            if level > _MOST_LEVELS:
                raise CannotTellError(_CIRCLE)
            yield bases[0]
            bases = self._bases(bases[0])
            level += 1
        yield from _merged([*(list(self.classes(base, level)) for base in bases), bases])

    def _bases(self, definition: Definition) -> list[Definition]:
        assert isinstance(definition.node, ast.ClassDef)
        bases = []
        for base, name in zip(definition.node.bases, base_names(definition), strict=True):
            if name in _EMPTY or self.is_left_out(name):
                continue
            try:
                bases.append(self._base(definition, base, name))
            except RecursionError as error:  # class Net(Net.Inner)
                if not self.skips_unreadable:
                    raise CannotTellError(_CIRCLE) from error
            except UnresolvedError:
                if not self.skips_unreadable:
                    raise
        return bases

    def _base(self, definition: Definition, base: ast.expr, name: str) -> Definition:
        assert isinstance(definition.node, ast.ClassDef)
        owner, names = definition.node.name, dotted_names(base)
        if not names or name.startswith("builtins."):
            raise CannotTellError(
                f"a base of {owner} is {'built into Python' if names else 'made by a call'}"
            )
        resolved = self.resolver.dotted(definition.module, names)
        if (
            not isinstance(resolved, Definition)
            or resolved.num_bound
            or not isinstance(resolved.node, ast.ClassDef)
        ):
            raise CannotTellError(f"a base of {owner} is no class")
        return resolved


def _merged(rows: list[list[Definition]]) -> Iterator[Definition]:
    """Yield the classes of all rows once, keeping the order of every row: Python's own order (C3)."""
    while rows := [row for row in rows if row]:
        heads = [row[0] for row in rows]
        free = [head for head in heads if not any(head in row[1:] for row in rows)]
        if not free:
            raise CannotTellError("the bases have no common order")
        yield free[0]
        rows = [row[1:] if row[0] == free[0] else row for row in rows]
