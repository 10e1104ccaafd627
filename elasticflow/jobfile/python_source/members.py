"""What is called through a class: `Net.small`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.classes import lineage
from elasticflow.jobfile.python_source.definitions import Definition, MethodError, NoAttributeError
from elasticflow.jobfile.python_source.import_origins import origin
from elasticflow.jobfile.python_source.modules import CannotTellError

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.definitions import DottedNames


_CALLED_ON_CLASS = {"builtins.classmethod", "builtins.staticmethod"}
_NO_PLAIN_METHODS = _CALLED_ON_CLASS | {"builtins.property", "functools.cached_property"}


def member_of(owner: Definition, name: str, resolver: DottedNames) -> Definition:
    """Return a class method, a static method or an inner class, the class's own or inherited.

    Raises:
        NoAttributeError: the class has no such name.
        CannotTellError: it is bound in another way, or may be made by a base or a decorator.
    """
    assert isinstance(owner.node, ast.ClassDef)
    own = _own_member(owner, name)
    classes = [owner] if own else lineage(owner, resolver)
    for each in classes[1:]:
        own = own or _own_member(each, name)
    if own:
        return own
    if owner.node.decorator_list or owner.node.keywords:
        raise CannotTellError(f"{name} may come from a decorator of {owner.node.name}")
    methods = {method for each in classes if each.module.is_own for method in _plain_methods(each)}
    place = f"{owner.module.name}:{owner.node.name}"
    raise NoAttributeError(place, name, _callable_names(owner), tuple(sorted(methods)))


def _own_member(owner: Definition, name: str) -> Definition | None:
    assert isinstance(owner.node, ast.ClassDef)
    for statement in reversed(owner.node.body):
        if name in _bound_in(statement):
            return _as_called(owner, statement, name)
    return None


def _bound_in(member: ast.stmt) -> set[str]:
    """Return every name that a statement of a class body may bind."""
    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {member.name}
    return {getattr(each, "id", getattr(each, "name", "")) or "" for each in ast.walk(member)}


def _as_called(owner: Definition, member: ast.stmt, name: str) -> Definition:
    if isinstance(member, ast.ClassDef):
        return Definition(owner.module, member)
    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        kinds = {origin(owner.module, mark) for mark in member.decorator_list}
        if "builtins.staticmethod" in kinds:
            return Definition(owner.module, member)
        if "builtins.classmethod" in kinds:
            return Definition(owner.module, member, num_bound=1)
        if "builtins.property" in kinds:
            raise CannotTellError(f"{name} is a property")
        raise MethodError(owner, Definition(owner.module, member, num_bound=1), name)
    raise CannotTellError(f"{name} is bound in a way that reading does not show")


def _callable_names(owner: Definition) -> list[str]:
    """Return what can be called through the class itself."""
    names = []
    assert isinstance(owner.node, ast.ClassDef)
    for each in owner.node.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            kinds = {origin(owner.module, mark) for mark in each.decorator_list}
            if isinstance(each, ast.ClassDef) or kinds & _CALLED_ON_CLASS:
                names.append(each.name)
    return sorted(names)


def _plain_methods(owner: Definition) -> list[str]:
    """Return what is called on an object of the class, private methods left out."""
    assert isinstance(owner.node, ast.ClassDef)
    return [
        each.name
        for each in owner.node.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
        if not {origin(owner.module, mark) for mark in each.decorator_list} & _NO_PLAIN_METHODS
    ]
