"""Where the value of a variable comes from: through assignments, parameters, functions and `prepare` of one file."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.lint.script.script import Function
from elasticflow.lint.script.values import passed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.lint.script.script import Script

_MOST_HOPS = 12
_PREPARING = {"prepare", "setup", "setup_dataloaders", "setup_optimizers", "setup_module"}


class Definition(NamedTuple):
    """An expression that makes a value.

    Attributes:
        node: The expression; no variable whose definition is known.
        is_prepared: It has gone through `accelerator.prepare` or `fabric.setup` on the way.
    """

    node: ast.expr
    is_prepared: bool


def definitions(script: Script, node: ast.expr) -> list[Definition]:
    """Return what may make the value of an expression; for a variable that the file does not define, itself."""
    found: list[Definition] = []
    _collect(script, node, is_prepared=False, seen=set(), found=found)
    return found


def calls_behind(script: Script, node: ast.expr) -> list[ast.Call]:
    """Return the calls among the definitions of an expression."""
    return [each.node for each in definitions(script, node) if isinstance(each.node, ast.Call)]


def _collect(script: Script, node: ast.expr, *, is_prepared: bool, seen: set[tuple[ast.AST, int]], found: list[Definition]) -> None:  # fmt: skip
    if len(seen) > _MOST_HOPS * 4:
        return
    values = list(_behind(script, node, seen))
    if not values and not _is_seen(script, node, seen):
        found.append(Definition(node, is_prepared))
    for value, was_prepared in values:
        _collect(script, value, is_prepared=is_prepared or was_prepared, seen=seen, found=found)


def _is_seen(script: Script, node: ast.expr, seen: set[tuple[ast.AST, int]]) -> bool:
    """Return whether all that makes a variable was looked at on the way here: `x = prepare(x)`."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    return any((statement, place) in seen for statement, _, place in assignments(script, node))


def _behind(
    script: Script, node: ast.expr, seen: set[tuple[ast.AST, int]]
) -> Iterator[tuple[ast.expr, bool]]:
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield body, False
            yield orelse, False
        case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
            yield from _bound(script, node, seen)
        case ast.Call():
            function = script.called(node)
            if function is not None and (function, -1) not in seen:
                seen.add((function, -1))
                yield from ((value, False) for value in returns_of(function))
        case _:
            return


def _bound(script: Script, node: ast.expr, seen: set[tuple[ast.AST, int]]) -> Iterator[tuple[ast.expr, bool]]:
    for statement, value, place in assignments(script, node):
        if (statement, place) in seen:
            continue
        seen.add((statement, place))
        if place < 0:
            yield _prepared(value) or (value, False)
        else:
            yield from _part(script, value, place)
    function = script.function_of(node)
    if isinstance(node, ast.Name) and function is not None and (function, hash(node.id)) not in seen:
        seen.add((function, hash(node.id)))
        yield from ((value, False) for value in given(script, function, node.id))


def given(script: Script, function: Function, name: str) -> list[ast.expr]:
    """Return what the calls of a function in this file pass for a parameter; empty if it has none of this name."""
    arguments = function.args
    if all(each.arg != name for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)):
        return []
    values = (passed(script, call, function, name) for call in script.callers.get(function, []))
    return [value for value in values if value is not None]


def assignments(script: Script, node: ast.expr) -> Iterator[tuple[ast.stmt, ast.expr, int]]:
    """Yield the assignments to a variable in its function, else in the module, or to an attribute of `self` in its class.

    Each with its value, and with the place in it where the value is taken apart, else -1.
    """
    text = ast.unparse(node)
    owner: ast.AST | None = (
        script.class_of(node) if isinstance(node, ast.Attribute) else script.function_of(node)
    )
    found = [each for each in _assigned(script, text) if _owner(script, each[0], node) is owner]
    if not found and isinstance(node, ast.Name) and owner is not None and not _is_parameter(owner, node.id):
        found = [each for each in _assigned(script, text) if script.function_of(each[0]) is None]
    yield from found


def _owner(script: Script, statement: ast.stmt, node: ast.expr) -> ast.AST | None:
    return script.class_of(statement) if isinstance(node, ast.Attribute) else script.function_of(statement)


def _is_parameter(function: ast.AST, name: str) -> bool:
    arguments = function.args if isinstance(function, Function) else None
    return arguments is not None and any(
        each.arg == name for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def _assigned(script: Script, text: str) -> Iterator[tuple[ast.stmt, ast.expr, int]]:
    for statement in script.nodes:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            if ast.unparse(statement.target) == text:
                yield statement, statement.value, -1
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    for place, each in enumerate(target.elts):
                        if ast.unparse(each) == text:
                            yield statement, statement.value, place
                elif ast.unparse(target) == text:
                    yield statement, statement.value, -1


def _prepared(value: ast.expr) -> tuple[ast.expr, bool] | None:
    """Return what `accelerator.prepare(x)` or `fabric.setup(x)` of one thing was given."""
    if (
        isinstance(value, ast.Call)
        and is_preparing(value)
        and len(value.args) == 1
        and not isinstance(value.args[0], ast.Starred)
    ):
        return value.args[0], True
    return None


def is_preparing(value: ast.AST) -> bool:
    """Return whether an expression is a call of `prepare` or `setup` of an object."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _PREPARING
    )


def _part(script: Script, value: ast.expr, place: int) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what stands at a place of a value that is taken apart."""
    parts: Sequence[ast.expr] = ()
    if isinstance(value, ast.Call) and is_preparing(value):
        if not any(isinstance(each, ast.Starred) for each in value.args):
            yield from ((each, True) for each in value.args[place : place + 1])
        return
    if isinstance(value, ast.Tuple | ast.List):
        parts = value.elts
    elif isinstance(value, ast.Call) and (function := script.called(value)) is not None:
        for returned in returns_of(function):
            if isinstance(returned, ast.Tuple) and place < len(returned.elts):
                yield returned.elts[place], False
        return
    yield from ((each, False) for each in parts[place : place + 1])


def returns_of(function: Function) -> list[ast.expr]:
    """Return what a function returns; functions inside it left out."""
    found: list[ast.expr] = []
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found
