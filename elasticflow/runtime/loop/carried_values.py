"""Finds variables by which one pass of a script's loop leaves values to the next: a prefetched batch, an agent's observation.

A restart makes what stands before the loop again, and continues with that. The script's source tells which names a loop
reads before it assigns them.
"""

from __future__ import annotations

import ast
import linecache
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays that the loops around *line* of *frame* carry, by variable.

    A single number is not among them: it is often a sum to be printed.
    """
    for name in _names(frame.f_code.co_filename, line):
        value = frame.f_locals.get(name)
        for each in value if isinstance(value, tuple) else (value,):
            if is_several_numbers(each):
                yield name, each


def is_several_numbers(value: Any) -> bool:
    """Return True for a tensor or an array of two or more numbers."""
    return (
        value.numel() > 1 if isinstance(value, Tensor) else isinstance(value, np.ndarray) and value.size > 1
    )


def line_of_epochs(frame: FrameType) -> int | None:
    """Return the line at which the loop over `Run.epochs` begins that *frame* is in; None if it is in no such loop."""
    for loop in _loops_around(frame.f_code.co_filename, frame.f_lineno):
        calls = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
        if any(isinstance(each, ast.Attribute) and each.attr == "epochs" for each in calls):
            return loop.lineno
    return None


@cache
def _loops_around(file: str, line: int) -> tuple[ast.For | ast.While, ...]:
    """Return the loops around *line*; none if the source cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    )


@cache
def _names(file: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop around *line* reads before it assigns them."""
    names: dict[str, None] = {}
    for loop in _loops_around(file, line):
        first: dict[str, bool] = {}
        assigned: set[str] = set()
        for part in [loop.target] if isinstance(loop, ast.For) else [loop.test]:
            _note(part, first, assigned)
        for statement in loop.body:
            _note(statement, first, assigned)
        names |= dict.fromkeys(name for name, is_read in first.items() if is_read and name in assigned)
    return tuple(names)


def _note(node: ast.AST, first: dict[str, bool], assigned: set[str]) -> None:
    """Note for each name whether it is read first, in the order in which Python evaluates *node*, and whether it is assigned."""
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.Name):
        is_read = isinstance(node.ctx, ast.Load)
        first.setdefault(node.id, is_read)
        if not is_read:
            assigned.add(node.id)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        first.setdefault(node.target.id, True)
    if isinstance(node, _COMPREHENSIONS):
        targets = [each for part in node.generators for each in ast.walk(part.target)]
        inner = {each.id for each in targets if isinstance(each, ast.Name)}
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        for name in names - inner:
            first.setdefault(name, True)
        return
    # Python evaluates the value first, which stands second in the tree.
    before = getattr(node, "iter", None) or getattr(node, "value", None)
    children = list(ast.iter_child_nodes(node))
    for child in sorted(children, key=lambda each: each is not before):
        _note(child, first, assigned)
