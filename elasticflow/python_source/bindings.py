"""The statements of a source text that bind a name, and the origin of a name by its imports."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
from typing import TYPE_CHECKING

from elasticflow.python_source.modules import CannotTellError, source_of
from elasticflow.python_source.syntax import (
    decorators_of,
    dotted_names,
    imported_names,
    is_for_checkers,
    parse,
)

if TYPE_CHECKING:
    from elasticflow.python_source.modules import Module

# Beyond this many characters of an installed module only the requested definition is parsed: torch/nn/functional.py takes 24 ms, a slice 1 ms.
_LARGE = 30_000


def is_large(text: str) -> bool:
    """Return whether a source text takes too long to be parsed as a whole."""
    return len(text) > _LARGE


@functools.lru_cache(maxsize=256)
def parse_python(text: str) -> list[ast.stmt]:
    """Return the statements of a source text.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    return parse(text).body


def bindings(text: str, name: str, *, is_cut: bool = False) -> tuple[list[ast.stmt], bool]:
    """Return the statements that bind *name* at module level, last first, and True if all of them always run.

    Args:
        is_cut: Parse only the definition, if the text is large and has one at the beginning of a line: no condition binds it anew.
    """
    if is_cut and is_large(text) and (definition := _slice(text, name)):
        return [definition], True
    always: list[ast.stmt] = []
    inner: list[ast.stmt] = []
    for statement in parse_python(text):
        if _binds(statement, name):
            always.append(statement)
        inner += [each for each in _conditional(statement) if _binds(each, name)]
    return [*reversed(always), *reversed(inner)], not inner


def _slice(text: str, name: str) -> ast.stmt | None:
    """Return the one top-level definition of *name*, parsed alone; None when it is not that simple."""
    heads = [at for word in ("def", "class", "async def") for at in _lines(text, f"{word} {name}", "(:[ \t")]
    rebinding = _lines(text, name, "=: \t")
    if rebinding or len(heads) != 1:
        return None
    start = heads[0]
    while start and text[text.rfind("\n", 0, start - 1) + 1] in "@)":  # its decorators
        start = text.rfind("\n", 0, start - 1) + 1
    end = re.compile(r"^[^\s#)\]}]", re.MULTILINE).search(text, text.find("\n", heads[0]) + 1)
    try:
        body = parse_python(
            "\n" * text.count("\n", 0, start) + text[start : end.start() if end else len(text)]
        )
    except SyntaxError:
        return None
    return body[0] if len(body) == 1 else None


def _lines(text: str, start: str, then: str) -> list[int]:
    """Return the offsets of lines that begin with *start* and a character of *then*; much faster than a pattern."""
    offsets, at = [], 0 if text.startswith(start) else text.find(f"\n{start}") + 1
    while at or text.startswith(start, at):
        if text[at + len(start) : at + len(start) + 1] in then:
            offsets.append(at)
        at = text.find(f"\n{start}", at) + 1
        if not at:
            break
    return offsets


def _conditional(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside an `if`, `try`, `match` and so on at module level, except those for type checkers only."""
    if is_for_checkers(statement):
        return statement.orelse
    return [deeper for each in _inside(statement) for deeper in (each, *_conditional(each))]


def _inside(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements directly inside a compound statement whose names are those of the module."""
    if not isinstance(statement, ast.If | ast.Try | ast.TryStar | ast.With | ast.For | ast.While | ast.Match):
        return []
    parts = (statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", []))
    return [each for part in parts for each in ast.iter_child_nodes(part) if isinstance(each, ast.stmt)]


def _binds(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.Import():
            return any((each.asname or each.name.partition(".")[0]) == name for each in statement.names)
        case ast.ImportFrom():
            return any((each.asname or each.name) == name for each in statement.names)
        case ast.Assign(targets=targets):
            return any(name in _targets(each) for each in targets)
        case ast.AnnAssign(target=ast.Name(id=target), value=value):
            return target == name and value is not None
        case _:
            return False


def _targets(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [name for part in parts for name in _targets(part)]
        case ast.Starred(value=inner):
            return _targets(inner)
        case _:
            return []  # AdamW.__doc__ = ... binds no name


_BINDING = ("import ", " as ", "class ", "def ", "\n")  # text before a name that is bound
HIDDEN_STAR = r"^[ \t]+from[ \t].*import[ \t(]+\*"
"""Pattern of a star import under a condition."""
# Decorators that do not change the parameters.
_TRANSPARENT = {
    "abc.abstractmethod", "builtins.classmethod", "builtins.staticmethod", "functools.cache", "functools.lru_cache",
    "torch.compile", "torch.enable_grad", "torch.inference_mode", "torch.no_grad", "typing.final", "typing.override",
    "typing.runtime_checkable", "typing_extensions.deprecated", "typing_extensions.final", "typing_extensions.override",
    "warnings.deprecated",
}  # fmt: skip


def origin(module: Module, node: ast.expr) -> str:
    """Return the dotted name an expression stands for: `functools.partial`, `builtins.int`.

    Empty for a name that the module defines itself, and if imports do not show the origin.
    """
    names = dotted_names(node)
    try:
        first = _first(source_of(module), names[0]) if names else ""
    except CannotTellError:
        return ""
    return ".".join([first, *names[1:]]) if first else ""


# Thousands of parameters may have one annotation.
@functools.lru_cache(maxsize=1024)
def _first(text: str, name: str) -> str:
    is_builtin = hasattr(builtins, name) and not _has_star(text)
    if is_builtin and not any(each + name in text for each in _BINDING):
        return f"builtins.{name}"  # at once: most annotations are int, float and the like
    return _table(text).get(name, f"builtins.{name}" if is_builtin else "")


def _has_star(text: str) -> bool:
    return "*" in text and re.search(r"^[ \t]*from[ \t].*import[ \t(]+\*", text, re.MULTILINE) is not None


@functools.lru_cache(maxsize=256)
def _table(text: str) -> dict[str, str]:
    """Return the origin of each imported name, also under `if TYPE_CHECKING:` and `try:`; "" for own names."""
    try:
        statements = _imports_of_large(text) if is_large(text) else parse_python(text)
    except SyntaxError:
        return {}
    origins: dict[str, str] = {}
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
            found = imported_names(each)
            # A relative import has no absolute dotted name here.
            origins |= {name: "" if what.startswith(".") else what for name, what in found.items()}
        else:
            pending += _inside(each)
    return origins | dict.fromkeys(own, "")


def _imports_of_large(text: str) -> list[ast.stmt]:
    """Return the import statements of a text that is too large to be parsed as a whole."""
    statements: list[ast.stmt] = []
    for each in re.findall(r"^[ \t]*((?:from|import)[ \t][^\n(]*(?:\([^)]*\))?)", text, re.MULTILINE):
        with contextlib.suppress(SyntaxError):
            statements += parse_python(each)
    return statements


def refuse_decorators(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    """Raise CannotTellError if a decorator may replace the function or class."""
    if any(origin(module, decorator) not in _TRANSPARENT for decorator in decorators_of(node)):
        raise CannotTellError(f"{node.name} is decorated")
