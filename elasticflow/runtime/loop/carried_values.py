"""Finds variables by which one pass of a script's loop leaves values to the next: a prefetched batch, an agent's observation.

A restart makes what stands before the loop again, and continues with that. The script's source tells which names a loop
reads before it assigns them.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from elasticflow.runtime.loop.script_loops import FUNCTIONS, loops_around

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

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
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return isinstance(value, Tensor | np.ndarray) and size > 1


@cache
def _names(file: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop around *line* reads before it assigns them."""
    names: dict[str, None] = {}
    for loop in loops_around(file, line):
        head = loop.target if isinstance(loop, ast.For) else loop.test
        uses = [use for part in (head, *loop.body) for use in _uses(part)]
        first = dict(reversed(uses))
        names |= {name: None for name, is_read in uses if is_read and first[name] and (name, False) in uses}
    return tuple(names)


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each name with whether it is read, not assigned, in the order in which Python evaluates *node*."""
    if isinstance(node, FUNCTIONS):
        return
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Load)
    elif isinstance(node, _COMPREHENSIONS):
        inside = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        own = {each.id for each in inside if isinstance(each.ctx, ast.Store)}
        yield from ((each.id, True) for each in inside if each.id not in own)
    else:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, True
        # Python evaluates the value first, which stands second in the tree.
        before = getattr(node, "iter", None) or getattr(node, "value", None)
        for child in sorted(ast.iter_child_nodes(node), key=lambda each: each is not before):
            yield from _uses(child)
