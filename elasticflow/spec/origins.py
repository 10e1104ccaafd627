"""Where a name that a module uses comes from, by its import statements alone (floor 1)."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from typing import TYPE_CHECKING

from elasticflow.spec.modules import CannotTellError, source_of

if TYPE_CHECKING:
    from elasticflow.spec.modules import Module

# One import statement, also in brackets over several lines; at any depth: `if TYPE_CHECKING:` and `try:` hold some.
_IMPORT = re.compile(r"^[ \t]*((?:from|import)[ \t][^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
_STAR = re.compile(r"^[ \t]*from[ \t].*import[ \t(]+\*", re.MULTILINE)
# Decorators that leave the arguments as they are.
_TRANSPARENT = {
    "abc.abstractmethod", "builtins.classmethod", "builtins.staticmethod", "functools.cache", "functools.lru_cache",
    "torch.compile", "torch.enable_grad", "torch.inference_mode", "torch.no_grad", "typing.final", "typing.override",
    "typing.runtime_checkable", "typing_extensions.deprecated", "typing_extensions.final", "typing_extensions.override",
    "warnings.deprecated",
}  # fmt: skip


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


def origin(module: Module, node: ast.expr) -> str:
    """Return the dotted name an expression stands for: `functools.partial`, `builtins.int`.

    Empty for a name of the module's own, and where imports do not show it.
    """
    names = dotted_names(node)
    try:
        first = _first(source_of(module), names[0]) if names else ""
    except CannotTellError:
        return ""
    return ".".join([first, *names[1:]]) if first else ""


@functools.lru_cache(maxsize=1024)
def _first(text: str, name: str) -> str:
    own = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    if name not in text or re.search(own, text, re.MULTILINE):
        return ""
    for found in _IMPORT.finditer(text):
        if name in found[1] and (dotted := _imported(found[1], name)):
            return dotted
    return f"builtins.{name}" if hasattr(builtins, name) and not _STAR.search(text) else ""


def _imported(statement: str, name: str) -> str:
    try:
        parsed = ast.parse(statement).body[0]
    except (SyntaxError, ValueError):
        return ""
    match parsed:
        case ast.Import(names=names):
            for each in names:
                if (each.asname or each.name.partition(".")[0]) == name:
                    return each.name if each.asname else name
        case ast.ImportFrom(names=names, level=0, module=str(package)):
            for each in names:
                if (each.asname or each.name) == name:
                    return f"{package}.{each.name}"
        case _:
            pass
    return ""


def refuse_decorators(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    """Return only when no decorator may change what is called.

    Raises:
        CannotTellError: one may.
    """
    for mark in node.decorator_list:
        if origin(module, mark.func if isinstance(mark, ast.Call) else mark) not in _TRANSPARENT:
            raise CannotTellError(f"{node.name} is decorated")
