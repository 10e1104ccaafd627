"""The classes a class inherits from, in the order Python looks methods up."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.bindings import dotted_names, origin
from elasticflow.jobfile.python_source.modules import CannotTellError

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.definitions import Definition, DottedNames

# Bases that define nothing a check looks for.
_EMPTY = {"builtins.object", "abc.ABC"} | {
    f"{home}.{name}" for home in ("typing", "typing_extensions") for name in ("Generic", "Protocol", "NamedTuple")
}  # fmt: skip
_NAMED_TUPLES = {"typing.NamedTuple", "typing_extensions.NamedTuple"}
_MOST_LEVELS = 20
_CIRCLE = "classes inherit in a circle"


def is_named_tuple(definition: Definition) -> bool:
    """Return whether the class is made by `class Name(NamedTuple)`."""
    assert isinstance(definition.node, ast.ClassDef)
    return any(origin(definition.module, base) in _NAMED_TUPLES for base in definition.node.bases)


def bases(definition: Definition, resolver: DottedNames) -> list[Definition]:
    """Return the classes named as bases, those that define nothing left out.

    Raises:
        CannotTellError: one of them cannot be read.
    """
    node, found = definition.node, []
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        names, known = dotted_names(base), origin(definition.module, base)
        if known in _EMPTY:
            continue
        if not names or known.startswith("builtins."):
            raise CannotTellError(
                f"a base of {node.name} is {'built into Python' if names else 'made by a call'}"
            )
        one = resolver.dotted(definition.module, names)
        if getattr(one, "num_bound", 0) or not isinstance(getattr(one, "node", None), ast.ClassDef):
            raise CannotTellError(f"a base of {node.name} is no class")
        found.append(one)
    return found  # type: ignore[return-value]  # what has a node is a definition


def lineage(definition: Definition, resolver: DottedNames, level: int = 0) -> list[Definition]:
    """Return the class and all it inherits from, as `__mro__` has them, without those that define nothing.

    Raises:
        CannotTellError: a base cannot be read, or there is no such order.
    """
    if level > _MOST_LEVELS:
        raise CannotTellError(_CIRCLE)
    try:
        above = bases(definition, resolver)
    except RecursionError as error:  # class Net(Net.Inner)
        raise CannotTellError(_CIRCLE) from error
    rows = [*(lineage(each, resolver, level + 1) for each in above), above]
    order = [definition]
    while rows := [row for row in rows if row]:
        heads = [row[0] for row in rows]
        free = [each for each in heads if not any(each in row[1:] for row in rows)]
        if not free:
            raise CannotTellError("the bases have no common order")
        order.append(free[0])
        rows = [row[1:] if row[0] == free[0] else row for row in rows]
    return order
