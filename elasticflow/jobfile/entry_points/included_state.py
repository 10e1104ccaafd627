"""Objects whose state a job includes in its snapshots: there, and able to give and take state.

Reads source only, as all checks of entry points do.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.definitions import Definition, MadeByCallError
from elasticflow.jobfile.python_source.import_origins import dotted_names
from elasticflow.jobfile.python_source.modules import CannotTellError, Module

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.resolve import Resolver

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
