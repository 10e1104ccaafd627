"""Facts that a piece of Python's syntax shows by itself, before any name is looked up."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.python_source.modules import Module


STAR = "*"
"""The key under which `imported_names` lists the module of `from module import *`."""


def parse(text: str) -> ast.Module:
    """Return the tree of a source text.

    Raises:
        SyntaxError: the text is not Python of this version.
    """
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
            return ast.parse(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from error


def dotted_name(node: ast.AST) -> str:
    """Return `a.b.c` for an expression of this form; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


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


def is_for_checkers(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Return whether a statement is `if TYPE_CHECKING:`, whose body no program runs."""
    return isinstance(statement, ast.If) and dotted_name(statement.test).rpartition(".")[2] == "TYPE_CHECKING"


def unquoted(annotation: ast.expr) -> ast.expr | None:
    """Return an annotation, quoted or not, as an expression; None if a quoted text is no expression."""
    if not isinstance(annotation, ast.Constant) or not isinstance(annotation.value, str):
        return annotation
    try:
        return ast.parse(annotation.value.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def decorators_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.expr]:
    """Return the decorators of a definition, without their arguments."""
    return [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]


def own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body in order, without the nodes of inner functions and classes."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
    waiting: list[ast.AST] = [*reversed(function.body)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, inner):
            waiting += [*ast.iter_child_nodes(node)][::-1]


def imported_from(statement: ast.ImportFrom, module: Module) -> str:
    """Return the full name of the module that a `from ... import` in *module* imports from."""
    base = [statement.module] if statement.module else []
    if statement.level:
        around = module.package.split(".")
        base = [*around[: len(around) - statement.level + 1], *base]
    return ".".join(base)


def imported_modules(node: ast.AST, module: Module) -> list[str]:
    """Return the modules that an import statement in *module* may import: for `from a import b`, a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = imported_from(node, module)
        return [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]
    return []


def imported_names(statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return the names that an import binds and their origins: `nn` is `torch.nn`; by `from . import data` `data` is `..data`."""
    if isinstance(statement, ast.Import):
        tops = {each.name.partition(".")[0] for each in statement.names if not each.asname}
        return {each.asname: each.name for each in statement.names if each.asname} | {
            top: top for top in tops
        }
    base = "." * statement.level + (statement.module or "")
    return {
        each.asname or each.name: base if each.name == STAR else f"{base}.{each.name}"
        for each in statement.names
    }


def called_name(call: ast.Call) -> str:
    """Return the last name of the called expression: `backward` of `loss(x).backward()`; empty if there is no name."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument that a call passes by name, or at a position from 0; None if absent or hidden by `*` or `**`."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: position + 1] if position is not None else []
    if position is None or len(before) <= position or any(isinstance(each, ast.Starred) for each in before):
        return None
    return before[position]


def has_unpacked(call: ast.Call) -> bool:
    """Return whether a call passes arguments that the text does not show: `*args`, `**options`."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(each, ast.Starred) for each in call.args
    )


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Return whether an expression is this constant."""
    return isinstance(node, ast.Constant) and node.value is value
