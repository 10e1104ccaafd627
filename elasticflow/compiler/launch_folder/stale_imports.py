"""What a train.py of an earlier version imports of elasticflow that this version no longer has; nothing is imported."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.python_source.bindings import bindings
from elasticflow.python_source.modules import CannotTellError, Finder, NoModuleError, source_of
from elasticflow.system.installation import ABOVE_PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.python_source.modules import Module


def stale_import(text: str) -> str | None:
    """Return the first name of elasticflow that *text* imports or uses and this version does not have, with its line.

    Like `elasticflow.runtime.member, in line 15`; None if this version has all of them.

    Raises:
        SyntaxError: it is no Python.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.Attribute)]
    modules: dict[str, str] = {}  # what the text calls each module that it imports -> the module's name
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        for parent, name in _uses(node, modules):
            if not _has(parent, name):
                return f"{parent}.{name}, in line {node.lineno}"
    return None


def _uses(node: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield module and name of each thing of elasticflow that a line imports or takes out of an imported module."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                parent, _, name = alias.name.rpartition(".")
                if _is_ours(parent):
                    yield parent, name
        case ast.ImportFrom(module=str(parent), names=names, level=0) if _is_ours(parent):
            for alias in names:
                modules[alias.asname or alias.name] = f"{parent}.{alias.name}"
                yield parent, alias.name
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            if name in modules and _module(modules[name]) is not None:
                yield modules[name], attribute
        case _:
            pass


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "elasticflow"


def _has(parent: str, name: str) -> bool:
    if _module(f"{parent}.{name}") is not None:
        return True
    module = _module(parent)
    return module is not None and bool(bindings(source_of(module), name)[0])


def _module(name: str) -> Module | None:
    above_package = ABOVE_PACKAGE
    try:
        return Finder((), (above_package,)).find(name)
    except (CannotTellError, NoModuleError):
        return None
