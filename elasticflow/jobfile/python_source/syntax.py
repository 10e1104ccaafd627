"""What a piece of Python's syntax says by itself, before any name is looked up."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.python_source.modules import Module


def dotted_names(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; empty for any other expression."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=inner, attr=name) if names := dotted_names(inner):
            return [*names, name]
        case ast.Subscript(value=inner):  # a generic base: Dataset[Sample]
            return dotted_names(inner)
        case _:
            return []


def unquoted(annotation: ast.expr) -> ast.expr | None:
    """Return an annotation, also one that is written in quotes, as an expression; None if its text is none."""
    if not isinstance(annotation, ast.Constant) or not isinstance(annotation.value, str):
        return annotation
    try:
        return ast.parse(annotation.value.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def decorators_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.expr]:
    """Return what decorates a definition, without the arguments it is called with."""
    return [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]


def own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body in their order, without those of functions and classes inside it."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
    waiting: list[ast.AST] = [*reversed(function.body)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, inner):
            waiting += [*ast.iter_child_nodes(node)][::-1]


def imported_from(statement: ast.ImportFrom, module: Module) -> str:
    """Return the whole name of what a `from ... import` in *module* imports from."""
    base = [statement.module] if statement.module else []
    if statement.level:
        around = module.package.split(".")
        base = [*around[: len(around) - statement.level + 1], *base]
    return ".".join(base)


def imported_modules(node: ast.AST, module: Module) -> list[str]:
    """Return what an import statement in *module* may import as modules: of `from a import b`, a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = imported_from(node, module)
        return [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]
    return []
