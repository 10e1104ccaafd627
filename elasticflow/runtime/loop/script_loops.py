"""The loops of a script, as its source tells them: the loops around a line, and the loop whose pass is a step."""

from __future__ import annotations

import ast
import linecache
import sys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.syntax import parse

if TYPE_CHECKING:
    from types import FrameType

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class OwnLoop(NamedTuple):
    """A loop without `Run.batches`, `Run.epochs` and `Run.steps`, each pass of which is a step."""

    frame: FrameType
    first: int
    last: int

    def is_running(self) -> bool:
        """Return True if the calling function, or one that has called it, is inside the loop."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None and self.first <= frame.f_lineno <= self.last


def own_loop_at(frame: FrameType) -> OwnLoop | None:
    """Return the loop in whose head *frame* is: `while run.position.step < 100:`, or `for step in range(run.position.step, 100):`.

    None if no `run.step(samples=...)` stands in its body, at its end in a `for`, or if it is inside another loop, whose code a
    restart would repeat.
    """
    lines = _lines_of_loop(frame.f_code.co_filename, frame.f_lineno)
    return None if lines is None else OwnLoop(frame, *lines)


@cache
def _lines_of_loop(file: str, line: int) -> tuple[int, int] | None:
    loops = loops_around(file, line)
    if len(loops) != 1:
        return None
    loop = loops[0]
    is_while = isinstance(loop, ast.While)
    head = loop.test if isinstance(loop, ast.While) else loop.iter
    is_range = isinstance(head, ast.Call) and isinstance(head.func, ast.Name) and head.func.id == "range"
    # The head of another `for` may make an iterator of a loader, whose order comes from draws. That of a `for` is read once, so
    # that nothing tells of draws between a step and the next pass, which a restart does not make.
    is_known = any(map(_steps, loop.body)) if is_while else is_range and _steps(loop.body[-1])
    if not is_known or not head.lineno <= line <= (head.end_lineno or 0):
        return None
    return loop.lineno, loop.body[-1].end_lineno or 0


def _steps(node: ast.AST) -> bool:
    """Return True if `run.step(samples=...)` stands in *node*, and not in a loop or a function inside of it."""
    if isinstance(node, (*FUNCTIONS, ast.For, ast.While)):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        return any(each.arg == "samples" for each in node.keywords)
    return any(map(_steps, ast.iter_child_nodes(node)))


def is_in_loop(frame: FrameType | None) -> bool:
    """Return True if *frame*, or a function of the script that has called it, is in a loop, or if its source cannot be read."""
    while frame is not None:
        file = frame.f_code.co_filename
        if loops_around(file, frame.f_lineno) or not linecache.getlines(file):
            return True
        frame = None if frame.f_code.co_name == "<module>" else frame.f_back
    return False


def line_of_epochs(frame: FrameType) -> int | None:
    """Return the line at which the loop over `Run.epochs` begins that *frame* is in; None if it is in no such loop."""
    for loop in loops_around(frame.f_code.co_filename, frame.f_lineno):
        calls = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
        if any(isinstance(each, ast.Attribute) and each.attr == "epochs" for each in calls):
            return loop.lineno
    return None


@cache
def loops_around(file: str, line: int) -> tuple[ast.For | ast.While, ...]:
    """Return the loops around *line*; none if the source cannot be read."""
    return tuple(
        node
        for node in nodes_of(file)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    )


@cache
def scope_of(file: str, line: int) -> tuple[ast.AST, ...]:
    """Return the nodes of the innermost function around *line*; of the whole file outside of functions."""
    functions = [
        node
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return tuple(ast.walk(max(functions, key=lambda node: node.lineno))) if functions else nodes_of(file)


@cache
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's source; none if it cannot be read."""
    try:
        return tuple(ast.walk(parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
