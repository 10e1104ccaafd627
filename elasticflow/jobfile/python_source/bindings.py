"""Which statements of a source text bind a name, large texts cut to the one definition."""

from __future__ import annotations

import ast
import functools
import re

# Beyond this many characters only the definition asked for is parsed: torch/nn/functional.py takes 24 ms, a slice 1 ms.
_LARGE = 30_000


def is_large(text: str) -> bool:
    """Return whether a source text takes too long to be parsed as a whole."""
    return len(text) > _LARGE


@functools.lru_cache(maxsize=256)
def parse(text: str) -> list[ast.stmt]:
    """Return the statements of a source text.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
            return ast.parse(text).body
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from error


def bindings(text: str, name: str) -> tuple[list[ast.stmt], bool]:
    """Return the statements that bind *name* at module level, last first, and whether all of them always run."""
    if is_large(text) and (one := _slice(text, name)):
        return [one], True
    found: list[ast.stmt] = []
    inner: list[ast.stmt] = []
    for statement in parse(text):
        if _binds(statement, name):
            found.append(statement)
        inner += [each for each in _conditional(statement) if _binds(each, name)]
    return [*reversed(found), *reversed(inner)], not inner


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
        body = parse("\n" * text.count("\n", 0, start) + text[start : end.start() if end else len(text)])
    except SyntaxError:
        return None
    return body[0] if len(body) == 1 else None


def _lines(text: str, start: str, then: str) -> list[int]:
    """Return where lines begin with *start* and one of the characters *then*; many times faster than a pattern."""
    found, at = [], 0 if text.startswith(start) else text.find(f"\n{start}") + 1
    while at or text.startswith(start, at):
        if text[at + len(start) : at + len(start) + 1] in then:
            found.append(at)
        at = text.find(f"\n{start}", at) + 1
        if not at:
            break
    return found


def _conditional(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside an `if`, `try` or `with` at module level; not those for type checkers only."""
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
        return statement.orelse
    if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
        direct = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
        handlers = [each for handler in getattr(statement, "handlers", []) for each in handler.body]
        return [deeper for each in (*direct, *handlers) for deeper in (each, *_conditional(each))]
    return []


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
