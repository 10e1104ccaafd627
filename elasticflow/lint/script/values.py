"""Finds the parts of an expression through the variables of the file."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.lint.script.ranks import words_of
from elasticflow.python_source.syntax import dotted_name

if TYPE_CHECKING:
    from elasticflow.python_source.script import Function, Script

_MOST_HOPS = 4
_MOST_VALUES = 4


def words_behind(script: Script, node: ast.expr, hops: int = _MOST_HOPS) -> set[str]:
    """Return the names, attributes and texts in an expression and in all values that the file assigns to them."""
    words: set[str] = set()
    seen: set[str] = set()
    waiting: list[ast.expr] = [node]
    for _ in range(hops + 1):
        behind: list[ast.expr] = []
        for each in waiting:
            words |= words_of(each)
            for part in ast.walk(each):
                name = dotted_name(part)
                if name and name not in seen:
                    seen.add(name)
                    behind += _assigned(script, part)
        waiting = behind
    return words


def _assigned(script: Script, node: ast.AST) -> list[ast.expr]:
    """Return the values that the file assigns to a variable or attribute; empty for a name with very many values."""
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Name):
        values = script.names.assigned(node.id)
    elif isinstance(node, ast.Attribute):
        values = script.names.assigned_attribute(node.attr)
    return [value for value in values if value is not None] if len(values) <= _MOST_VALUES else []


def values_given(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return the expression itself, or for a parameter the values passed in this file; empty if a call hides one."""
    function = script.function_of(node)
    if not isinstance(node, ast.Name) or function is None or not script.names.is_parameter(node.id, function):
        return [node]
    found = []
    for call in script.callers.get(function, []):
        value = passed(script, call, function, node.id)
        if value is None:
            return []
        found.append(value)
    return found


def passed(script: Script, call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return the value that a call in this file passes for a parameter, else the default; None if unclear."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        not each.arg for each in call.keywords
    ):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    parameters = [*function.args.posonlyargs, *function.args.args]
    names = [each.arg for each in parameters]
    is_bound = isinstance(script.scope_of(function), ast.ClassDef) and names[:1] == ["self"]
    if name in names:
        position = names.index(name) - is_bound
        if 0 <= position < len(call.args):
            return call.args[position]
        behind = names.index(name) - len(names) + len(function.args.defaults)
        return function.args.defaults[behind] if behind >= 0 else None
    return None


def is_repeated(script: Script, node: ast.AST, hops: int = _MOST_HOPS) -> bool:
    """Return whether a place lies in a loop, or in a function that this file calls in a loop."""
    for whole, part in script.above(node):
        if isinstance(whole, ast.For | ast.AsyncFor | ast.While) and part in whole.body:
            return True
    function = script.function_of(node)
    if function is None or not hops:
        return False
    calls = script.callers.get(function, [])
    return any(is_repeated(script, call, hops - 1) for call in calls)
