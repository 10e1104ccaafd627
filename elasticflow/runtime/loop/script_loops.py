"""The loops of a script, as its source tells them: those around a line, the loop whose pass is a step, and what passes leave to the next.

A restart makes what stands before the loop again, and continues with that. So a name that a loop reads before it assigns it, such as
a prefetched batch or an agent's observation, is not as it was.
"""

from __future__ import annotations

import ast
import linecache
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
from torch import Tensor, nn

from elasticflow.python_source.syntax import parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_CHOICES = (ast.If, ast.IfExp, ast.Try, ast.Match)
_OURS = {"kept", "position"}
_FILLS = {"copy_", "fill_", "normal_", "uniform_", "zero_"}
_UPDATES = {"add_", "clamp_", "div_", "lerp_", "mul_", "sub_"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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
    loops = _loops_around(file, line)
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
    if isinstance(node, (*_FUNCTIONS, ast.For, ast.While)):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        return any(each.arg == "samples" for each in node.keywords)
    return any(map(_steps, ast.iter_child_nodes(node)))


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
    return tuple(
        node
        for node in nodes_of(file)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    )


@cache
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's source; none if it cannot be read."""
    try:
        return tuple(ast.walk(parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def is_enumerated(frame: FrameType) -> bool:
    """Return True if *frame* is at the head of a loop over `enumerate(...)` that begins at the same number each time."""
    heads = [node.iter for node in nodes_of(frame.f_code.co_filename) if isinstance(node, ast.For)]
    return any(
        isinstance(head, ast.Call)
        and isinstance(head.func, ast.Name)
        and head.func.id == "enumerate"
        and all(
            isinstance(each, ast.Constant) for each in (*head.args[1:], *(k.value for k in head.keywords))
        )
        and head.lineno <= frame.f_lineno <= (head.end_lineno or 0)
        for head in heads
    )


def carried_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and shuffled lists that the loops around *line* of *frame* carry, by variable.

    A single number is not among them: it is often a sum to be printed. Neither is another list: it is often a record.
    """
    for name in _carried_names(frame.f_code.co_filename, line):
        value = frame.f_locals.get(name)
        for each in value if isinstance(value, tuple) else (value,):
            is_order = isinstance(each, list) and name in _shuffled(frame.f_code.co_filename)
            if is_order or is_several_numbers(each):
                yield name, each


def counted_in(frame: FrameType, line: int) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that the loops around *line* carry and use as an index, or give to a model; not those to be printed."""
    variables: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
    for name, model in _numbers_used(frame.f_code.co_filename, line):
        value = variables.get(name)
        if isinstance(value, int | float) and (model is None or isinstance(variables.get(model), nn.Module)):
            yield name, value


def made_in_each_pass(frame: FrameType, line: int) -> frozenset[str]:
    """Return the variables that the innermost loop around *line* always assigns before it reads them."""
    loops = _loops_around(frame.f_code.co_filename, line)
    return _made_in(max(loops, key=lambda loop: loop.lineno)) if loops else frozenset()


def is_several_numbers(value: Any) -> bool:
    """Return True for a tensor or an array of two or more numbers."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return isinstance(value, Tensor | np.ndarray) and size > 1


@cache
def set_by_the_run(file: str) -> frozenset[str]:
    """Return the variables and attributes that a file sets from `Run.position` or `Run.kept`: they are right after a restart."""
    return frozenset(
        each.id if isinstance(each, ast.Name) else each.attr
        for node in nodes_of(file)
        if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Attribute) and each.attr in _OURS for each in ast.walk(node.value))
        for target in node.targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store)
    )


@cache
def _shuffled(file: str) -> frozenset[str]:
    """Return the variables that a file gives to a function `shuffle`, which changes them in place."""
    places = [node.args[0] for node in nodes_of(file) if _is_shuffle(node)]
    return frozenset(place.id for place in places if isinstance(place, ast.Name))


def _is_shuffle(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    return "shuffle" in {getattr(node.func, "attr", None), getattr(node.func, "id", None)}


@cache
def _carried_names(file: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop around *line* reads before it assigns them."""
    names: dict[str, None] = {}
    for loop in _loops_around(file, line):
        uses, first = _uses_in(loop)
        names |= {name: None for name, is_read in uses if is_read and first[name] and (name, False) in uses}
    return tuple(names)


def _uses_in(loop: ast.For | ast.While) -> tuple[list[tuple[str, bool]], dict[str, bool]]:
    """Return each use of a name in a pass of *loop*, as `_uses`, and the first use of each name."""
    uses = [use for part in _parts_of(loop) for use in _uses(part)]
    return uses, dict(reversed(uses))


def _parts_of(loop: ast.For | ast.While) -> list[ast.AST]:
    return [loop.target if isinstance(loop, ast.For) else loop.test, *loop.body]


@cache
def _numbers_used(file: str, line: int) -> tuple[tuple[str, str | None], ...]:
    """Return the names that a loop around *line* carries and uses as an index, with None, or gives to a call, with its name."""
    loops = _loops_around(file, line)
    names = set(_carried_names(file, line)) - set_by_the_run(file)
    found: dict[tuple[str, str | None], None] = {}
    for node in (each for loop in loops for each in ast.walk(loop)):
        inside: list[ast.AST] = []
        model = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            inside = list(ast.walk(node.slice))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            inside, model = [*node.args, *(each.value for each in node.keywords)], node.func.id
        found |= {
            (each.id, model): None for each in inside if isinstance(each, ast.Name) and each.id in names
        }
    return tuple(found)


@cache
def _made_in(loop: ast.For | ast.While) -> frozenset[str]:
    """Return the names of which the first use in *loop* is an assignment that no condition stands before."""
    _, first = _uses_in(loop)
    always: set[str] = set()
    waiting = _parts_of(loop)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            always.add(node.id)
        if not isinstance(node, (*_CHOICES, *_FUNCTIONS, *_COMPREHENSIONS)):
            waiting.extend(ast.iter_child_nodes(node))
    return frozenset(name for name in always if not first.get(name, True))


def _written(node: ast.AST) -> tuple[str | None, bool]:
    """Return the variable whose values *node* overwrites in place, if it does, and whether it reads them for that."""
    place, reads = node, False
    if isinstance(node, ast.AugAssign):
        place, reads = node.target, True
    elif _is_shuffle(node):
        place, reads = node.args[0], True
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        place, reads = node.func.value, node.func.attr in _UPDATES
        if not reads and node.func.attr not in _FILLS:
            return None, False
    elif not (isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store)):
        return None, False
    while isinstance(place, ast.Subscript) or (isinstance(place, ast.Attribute) and place.attr == "data"):
        place = place.value
    return place.id if isinstance(place, ast.Name) else None, reads


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each name with whether it is read, not assigned, in the order in which Python evaluates *node*."""
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Load)
        return
    if isinstance(node, _COMPREHENSIONS):
        inside = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        own = {each.id for each in inside if isinstance(each.ctx, ast.Store)}
        yield from ((each.id, True) for each in inside if each.id not in own)
        return
    written, reads = _written(node)
    if written and reads:
        yield written, True
    # Python evaluates the value first, which stands second in the tree.
    before = getattr(node, "iter", None) or getattr(node, "value", None)
    # `x[i] = 0` and `x.zero_()` do not read x.
    place = getattr(node, "func", before) if written and not reads else None
    for child in sorted(ast.iter_child_nodes(node), key=lambda each: each is not before):
        if child is not place:
            yield from _uses(child)
    if written:
        yield written, False
