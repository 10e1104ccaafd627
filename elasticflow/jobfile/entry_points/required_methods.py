"""Whether source shows that an object lacks the methods its key asks for: datasets, included state."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.bindings import dotted_names
from elasticflow.jobfile.python_source.definitions import Definition, MadeByCallError
from elasticflow.jobfile.python_source.modules import CannotTellError, Module

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.resolve import Resolver

_ITERABLE = "IterableDataset"
_TORCH_DATASETS = {"Dataset", "IterableDataset"}


def why_not_map_style(definition: Definition, resolver: Resolver) -> str | None:
    """Return what makes the class, or what the function returns, no map-style dataset; None when it may be one.

    Raises:
        CannotTellError: a base or a value hides it.
    """
    node = definition.node
    if isinstance(node, ast.ClassDef):
        return _of_class(definition, resolver)
    if isinstance(node, ast.Lambda):
        return None
    nodes = _own_nodes(node)
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in nodes):
        return "is a generator: it has no length"
    returned = {_class_name(each) for each in nodes if isinstance(each, ast.Return)}
    if len(returned) != 1 or None in returned:
        return None
    found = resolver.name(definition.module, returned.pop() or "")
    if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef) and found.module.is_own:
        reason = _of_class(found, resolver)
        return None if reason is None else f"returns {found.node.name}, which {reason}"
    return None


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
    """Return the nodes of a function's body, not those of functions inside it."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = list(function.body)
    while pending:
        each = pending.pop()
        found.append(each)
        if not isinstance(
            each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.GeneratorExp
        ):
            pending += ast.iter_child_nodes(each)
    return found


def _class_name(statement: ast.Return) -> str | None:
    value = statement.value
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def _of_class(definition: Definition, resolver: Resolver) -> str | None:
    names = _methods(definition, resolver, 0)
    if _ITERABLE in names:
        return "is an IterableDataset: it has no length"
    missing = [each for each in ("__len__", "__getitem__") if each not in names]
    if not missing or "__getattr__" in names:
        return None
    return f"has no {' and no '.join(missing)}"


def _methods(definition: Definition, resolver: Resolver, level: int) -> set[str]:
    node = definition.node
    if not isinstance(node, ast.ClassDef) or level > 10 or node.keywords:
        raise CannotTellError("a base is no plain class")
    if any(dotted_names(each)[-1:] != ["dataclass"] for each in map(_undressed, node.decorator_list)):
        raise CannotTellError(f"{node.name} is decorated")
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    assigned = [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
    names |= {target.id for target in assigned if isinstance(target, ast.Name)}
    for base in node.bases:
        dotted = dotted_names(base)
        if not dotted:
            raise CannotTellError(f"a base of {node.name} is made by a call")
        if dotted[-1] in _TORCH_DATASETS:  # torch's own, also where torch is not installed
            names |= {_ITERABLE} if dotted[-1] == _ITERABLE else {"__getitem__"}
        elif dotted[-1] not in {"object", "Generic", "Protocol", "ABC"}:
            found = resolver.dotted(definition.module, dotted)
            if not isinstance(found, Definition):
                raise CannotTellError(f"a base of {node.name} is no class")
            names |= _methods(found, resolver, level + 1)
    return names


def _undressed(mark: ast.expr) -> ast.expr:
    return mark.func if isinstance(mark, ast.Call) else mark


METHODS = ("state_dict", "load_state_dict")
_MOST_BASES = 10


def why_not_stateful(resolver: Resolver, module: str, attribute: str) -> tuple[str, str | None] | None:
    """Return why `module:attribute` is no object that a snapshot can hold, and where it is defined; None if it is one.

    Raises:
        NoModuleError, NoAttributeError, UnreadableModuleError: it does not exist.
        CannotTellError: reading does not show it.
    """
    try:
        found = resolver.entry(module, attribute)
    except MadeByCallError as error:
        return _why_not_made(resolver, error)
    if isinstance(found, Definition):
        kind = "class" if isinstance(found.node, ast.ClassDef) else "function"
        return f"is a {kind}, not an object with state", found.place
    return f"is {'a module' if isinstance(found, Module) else found.words}, not an object with state", None


def _why_not_made(resolver: Resolver, made: MadeByCallError) -> tuple[str, str | None] | None:
    names = dotted_names(made.call.func)
    if not names:
        raise made
    found = resolver.dotted(made.module, names)
    if not isinstance(found, Definition) or not isinstance(found.node, ast.ClassDef):
        raise made  # what a function returns is not read
    for method in METHODS:
        if not _has(resolver, found, method):
            return f"is a {found.node.name}, which has no `{method}`", found.place
    return None


def _has(resolver: Resolver, owner: Definition, method: str, level: int = 0) -> bool:
    node = owner.node
    if not isinstance(node, ast.ClassDef) or level > _MOST_BASES:
        raise CannotTellError("a base is no plain class")
    if node.keywords or node.decorator_list:
        raise CannotTellError(f"{node.name} has a metaclass or a decorator")
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in {method, "__getattr__"}:
            return True
        if isinstance(each, ast.Assign) and method in {getattr(at, "id", "") for at in each.targets}:
            return True
        if isinstance(each, ast.If | ast.Try | ast.With):
            raise CannotTellError(f"{node.name} defines methods under a condition")
    bases = [names for base in node.bases if (names := dotted_names(base)) != ["object"]]
    for names in bases:
        base = resolver.dotted(owner.module, names) if names else None
        if not isinstance(base, Definition):
            raise CannotTellError(f"a base of {node.name} is no class")
        if _has(resolver, base, method, level + 1):
            return True
    return False
