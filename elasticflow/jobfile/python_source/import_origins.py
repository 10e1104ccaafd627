"""Where a name that a module uses comes from, by its import statements alone."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.bindings import is_large, parse
from elasticflow.jobfile.python_source.modules import CannotTellError, source_of

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.modules import Module

_BINDING = ("import ", " as ", "class ", "def ", "\n")  # one of these stands before a name that is bound
HIDDEN_STAR = r"^[ \t]+from[ \t].*import[ \t(]+\*"
"""Pattern of an import under a condition of names that it does not list."""
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
        return origin_in(source_of(module), node) if names else ""
    except CannotTellError:
        return ""


def origin_in(text: str, node: ast.expr) -> str:
    """Return the dotted name an expression of the source *text* stands for, as `origin` does."""
    names = dotted_names(node)
    first = _first(text, names[0]) if names else ""
    return ".".join([first, *names[1:]]) if first else ""


def _first(text: str, name: str) -> str:
    is_builtin = hasattr(builtins, name) and not _has_star(text)
    if is_builtin and not any(each + name in text for each in _BINDING):
        return f"builtins.{name}"  # at once: most annotations are int, float and the like
    return _table(text).get(name, f"builtins.{name}" if is_builtin else "")


def _has_star(text: str) -> bool:
    return "*" in text and re.search(r"^[ \t]*from[ \t].*import[ \t(]+\*", text, re.MULTILINE) is not None


@functools.lru_cache(maxsize=256)
def _table(text: str) -> dict[str, str]:
    """Return where each imported name comes from, also under `if TYPE_CHECKING:` and `try:`; "" for own names."""
    try:
        statements = _imports_of_large(text) if is_large(text) else parse(text)
    except SyntaxError:
        return {}
    found: dict[str, str] = {}
    own = set(re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE)) if is_large(text) else set()
    pending = list(statements)
    while pending:
        each = pending.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(each.name)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= _imported(each)
        elif isinstance(each, ast.If | ast.Try | ast.With):
            pending += (inner for inner in ast.iter_child_nodes(each) if isinstance(inner, ast.stmt))
            pending += (inner for handler in getattr(each, "handlers", []) for inner in handler.body)
    return found | dict.fromkeys(own, "")


def _imports_of_large(text: str) -> list[ast.stmt]:
    """Return the import statements of a text that is too large to be parsed as a whole."""
    found: list[ast.stmt] = []
    for each in re.findall(r"^[ \t]*((?:from|import)[ \t][^\n(]*(?:\([^)]*\))?)", text, re.MULTILINE):
        with contextlib.suppress(SyntaxError):
            found += parse(each)
    return found


def _imported(statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    if isinstance(statement, ast.Import):
        tops = {each.name.partition(".")[0] for each in statement.names if not each.asname}
        return {each.asname: each.name for each in statement.names if each.asname} | {
            top: top for top in tops
        }
    if statement.level or statement.module is None:
        return {each.asname or each.name: "" for each in statement.names}
    return {each.asname or each.name: f"{statement.module}.{each.name}" for each in statement.names}


def refuse_decorators(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    """Return only when no decorator may change what is called.

    Raises:
        CannotTellError: one may.
    """
    for mark in node.decorator_list:
        if origin(module, mark.func if isinstance(mark, ast.Call) else mark) not in _TRANSPARENT:
            raise CannotTellError(f"{node.name} is decorated")
