"""Finds objects that certainly lack the methods their key needs: datasets, metrics, included state."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.python_source.bindings import refuse_decorators
from elasticflow.python_source.classes import base_names, classes_of, methods_of
from elasticflow.python_source.modules import CannotTellError, Definition, MadeByCallError, Module
from elasticflow.python_source.syntax import decorators_of, dotted_names, own_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from elasticflow.python_source.resolve import Resolver

# Bases that are known by their names: torch may not be installed here. Other libraries have classes called Dataset, too.
_MAP, _ITERABLE = (
    frozenset(f"torch.utils.data.{name}" for name in (kind, f"dataset.{kind}"))
    for kind in ("Dataset", "IterableDataset")
)


def why_not_map_style(definition: Definition, resolver: Resolver) -> str | None:
    """Return why the class, or the result of the function, is no map-style dataset; None if it may be one.

    Raises:
        CannotTellError: a base or a value hides the answer.
    """
    node = definition.node
    if isinstance(node, ast.ClassDef):
        return _of_class(definition, resolver)
    if isinstance(node, ast.Lambda):
        return None
    refuse_decorators(definition.module, node)
    nodes = list(own_nodes(node))
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in nodes):
        return "is a generator: it has no length"
    returned = {_class_name(each) for each in nodes if isinstance(each, ast.Return)}
    if len(returned) != 1 or None in returned:
        return None
    resolved = resolver.name(definition.module, returned.pop() or "")
    if (
        isinstance(resolved, Definition)
        and isinstance(resolved.node, ast.ClassDef)
        and resolved.module.is_own
    ):
        reason = _of_class(resolved, resolver)
        return None if reason is None else f"returns {resolved.node.name}, which {reason}"
    return None


def _class_name(statement: ast.Return) -> str | None:
    value = statement.value
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def _of_class(definition: Definition, resolver: Resolver) -> str | None:
    names: set[str] = set()
    for owner in _owners(definition, resolver):
        assert isinstance(owner.node, ast.ClassDef)
        # A base that a star import or another module of the job passes on is met as the class itself.
        bases = {*base_names(owner), f"{owner.module.name}.{owner.node.name}"}
        if bases & _ITERABLE:
            return "is an IterableDataset: it has no length"
        names |= methods_of(owner) | ({"__getitem__"} if bases & _MAP else set())
    missing = [each for each in ("__len__", "__getitem__") if each not in names]
    if not missing or "__getattr__" in names:
        return None
    return f"has no {' and no '.join(missing)}"


def _owners(definition: Definition, resolver: Resolver) -> Iterator[Definition]:
    """Yield a class of data and its bases, without torch's own."""
    for owner in classes_of(definition, resolver, is_left_out=lambda name: name in _MAP | _ITERABLE):
        _refuse_hidden_methods(owner, {"dataclass"})
        yield owner


def _refuse_hidden_methods(owner: Definition, known_decorators: Collection[str] = ()) -> None:
    """Raise CannotTellError if a metaclass or a decorator may add methods that the class body does not show."""
    node = owner.node
    assert isinstance(node, ast.ClassDef)
    decorators = decorators_of(node)
    if node.keywords or any(not set(dotted_names(each)[-1:]) & {*known_decorators} for each in decorators):
        raise CannotTellError(f"{node.name} has a metaclass or a decorator")


def attributes_of(definition: Definition, resolver: Resolver) -> set[str]:
    """Return the attributes of the objects of a class, or of the class that a function of the job returns.

    Raises:
        UnresolvedError: a base or a value hides some attributes.
    """
    node = definition.node
    if isinstance(node, ast.FunctionDef) and definition.module.is_own:
        refuse_decorators(definition.module, node)
        returned = {_class_name(each) for each in own_nodes(node) if isinstance(each, ast.Return)}
        resolved = resolver.name(definition.module, returned.pop() or "") if len(returned) == 1 else None
        if isinstance(resolved, Definition) and isinstance(resolved.node, ast.ClassDef):
            return attributes_of(resolved, resolver)
    if not isinstance(node, ast.ClassDef) or not definition.module.is_own:
        raise CannotTellError("what it returns is not read")
    names: set[str] = set()
    for owner in _owners(definition, resolver):
        names |= methods_of(owner)
        for each in ast.walk(owner.node):
            match each:
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(attr="__dict__" | "__setattr__") | ast.Name(id="setattr" | "vars"):
                    raise CannotTellError("attributes are set by their names")
                case _:
                    pass
    if "__getattr__" in names or "__getattribute__" in names:
        raise CannotTellError("attributes are made when they are asked for")
    return names


def methods_missing(definition: Definition, resolver: Resolver) -> list[str]:
    """Return which of `update` and `compute` a class certainly lacks.

    Raises:
        UnresolvedError: reading does not show the methods.
    """
    assert isinstance(definition.node, ast.ClassDef)
    if any(isinstance(each, ast.FunctionDef) and each.name == "__new__" for each in definition.node.body):
        return []  # it may make objects of other classes
    return [name for name in ("update", "compute") if not _has(resolver, definition, name)]


METHODS = ("state_dict", "load_state_dict")


def why_not_stateful(resolver: Resolver, entry: str) -> tuple[str, str | None] | None:
    """Return why a snapshot cannot hold the object `module:attribute`, and the place of its definition; None if it can.

    Raises:
        NoModuleError, NoAttributeError, UnreadableModuleError: the object does not exist.
        CannotTellError: reading does not show the answer.
    """
    try:
        resolved = resolver.entry(entry)
    except MadeByCallError as error:
        return _why_not_made(resolver, error)
    if isinstance(resolved, Definition):
        kind = "class" if isinstance(resolved.node, ast.ClassDef) else "function"
        return f"is a {kind}, not an object with state", resolved.where
    return (
        f"is {'a module' if isinstance(resolved, Module) else resolved.words}, not an object with state",
        None,
    )


def _why_not_made(resolver: Resolver, made: MadeByCallError) -> tuple[str, str | None] | None:
    names = dotted_names(made.call.func)
    if not names:
        raise made
    resolved = resolver.dotted(made.module, names)
    if not isinstance(resolved, Definition) or not isinstance(resolved.node, ast.ClassDef):
        raise made  # the result of a function is not read
    for method in METHODS:
        if not _has(resolver, resolved, method):
            return f"is a {resolved.node.name}, which has no `{method}`", resolved.where
    return None


def _has(resolver: Resolver, definition: Definition, method: str) -> bool:
    for owner in classes_of(definition, resolver):
        assert isinstance(owner.node, ast.ClassDef)
        _refuse_hidden_methods(owner)
        if methods_of(owner) & {method, "__getattr__"}:
            return True
    return False
