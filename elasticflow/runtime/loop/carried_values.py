"""Finds variables by which one pass of a script's loop leaves values to the next: a prefetched batch, an agent's observation.

A restart makes what stands before the loop again, and continues with that. The script's source tells which names a loop
reads before it assigns them.
"""

from __future__ import annotations

import ast
import itertools
import math
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from torch import Tensor, nn

from elasticflow.runtime.loop.script_loops import FUNCTIONS, loops_around, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_CHOICES = (ast.If, ast.IfExp, ast.Try, ast.Match)
_OURS = {"kept", "position", "end", "number"}
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic"}
_LOOPS = {"epochs", "steps", "batches"}
_FILLS = {"copy_", "fill_", "normal_", "uniform_", "zero_"}
_UPDATES = {"add_", "clamp_", "div_", "lerp_", "mul_", "sub_"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and shuffled lists that the loops around *line* of *frame* carry, by variable.

    For a single number, which is often a sum to be printed, see `counted_in`. Another list is often a record.
    """
    for name in _names(frame.f_code.co_filename, line):
        value = frame.f_locals.get(name)
        for each in value if isinstance(value, tuple) else (value,):
            is_order = isinstance(each, list) and name in _shuffled(frame.f_code.co_filename)
            if is_order or is_several_numbers(each):
                yield name, each


def counted_in(frame: FrameType, line: int) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that the loops around *line* carry, and that a gradient, a rate, an index, a model or a file depends on.

    Those that are only printed are not among them.
    """
    variables: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
    for name, model in _numbers_used(frame.f_code.co_filename, line):
        value = variables.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, int | float) and (model is None or isinstance(variables.get(model), nn.Module)):
            yield name, value


def deciders_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a step, the end or a file of the loops around *line* depends on, by path, `self.stopper`, with the object that has it."""
    loops = loops_around(frame.f_code.co_filename, line)
    variables = {**frame.f_globals, **frame.f_locals}
    # A loop that assigns first what it reads carries nothing.
    carried = {name for loop in loops for name, is_read in _uses_in(loop)[1].items() if is_read}
    found: dict[str, tuple[Any, Any]] = {}
    for path in sorted(set().union(*map(_learned_from, loops))):
        first, *attributes = path.split(".")
        value, owner = variables.get(first) if first in carried else None, None
        for attribute in attributes:
            value, owner = getattr(value, "__dict__", {}).get(attribute), value
        found[path] = value, owner
    for path, (value, owner) in found.items():
        inside = [each for inner, (each, _) in found.items() if inner.startswith(f"{path}.")]
        # These are looked at where nothing else of an object is read.
        is_numbers = inside and all(type(each) in (int, float) for each in inside)
        if value is not None and not is_numbers:
            yield path, value, owner


def made_in_each_pass(frame: FrameType, line: int) -> frozenset[str]:
    """Return the variables that the innermost loop around *line* always assigns before it reads them."""
    loops = loops_around(frame.f_code.co_filename, line)
    return _made_in(max(loops, key=lambda loop: loop.lineno)) if loops else frozenset()


def is_several_numbers(value: Any) -> bool:
    """Return True for a tensor or an array of two or more numbers."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return isinstance(value, Tensor | np.ndarray) and size > 1


@cache
def set_by_the_run(file: str) -> frozenset[str]:
    """Return the variables and attributes that a file sets from `Run.position`, `Run.kept`, a batch or the number of an epoch.

    They are right after a restart.
    """
    loops = [node for node in nodes_of(file) if isinstance(node, ast.For) and _reads(node.iter, _LOOPS)]
    counted = {loop.target.id for loop in loops if isinstance(loop.target, ast.Name)}
    return frozenset(
        each.id if isinstance(each, ast.Name) else each.attr
        for node in nodes_of(file)
        if isinstance(node, ast.Assign)
        and (_reads(node.value, _OURS) or (isinstance(node.value, ast.Name) and node.value.id in counted))
        for target in node.targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store)
    )


@cache
def added_to(file: str) -> frozenset[str]:
    """Return the attributes that a file adds to: `self.tokens += count`."""
    targets = [node.target for node in nodes_of(file) if isinstance(node, ast.AugAssign)]
    return frozenset(target.attr for target in targets if isinstance(target, ast.Attribute))


def _reads(node: ast.AST, attributes: set[str]) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in attributes for each in ast.walk(node))


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
def _names(file: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop around *line* reads before it assigns them."""
    names: dict[str, None] = {}
    for loop in loops_around(file, line):
        uses, first = _uses_in(loop)
        names |= {name: None for name, is_read in uses if is_read and first[name] and (name, False) in uses}
    return tuple(names)


@cache
def _uses_in(loop: ast.For | ast.While) -> tuple[list[tuple[str, bool]], dict[str, bool]]:
    """Return each use of a name in a pass of *loop*, as `_uses`, and the first use of each name."""
    uses = [use for part in _parts_of(loop) for use in _uses(part)]
    return uses, dict(reversed(uses))


def _parts_of(loop: ast.For | ast.While) -> list[ast.AST]:
    return [loop.target if isinstance(loop, ast.For) else loop.test, *loop.body]


@cache
def _numbers_used(file: str, line: int) -> tuple[tuple[str, str | None], ...]:
    """Return the names that a loop around *line* carries and gives to a call, with its name, or that a step depends on, with None."""
    loops = loops_around(file, line)
    names = set(_names(file, line)) - set_by_the_run(file)
    found: dict[tuple[str, str | None], None] = {
        (name, None): None for loop in loops for name in sorted(names & _learned_from(loop))
    }
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
def _learned_from(loop: ast.For | ast.While) -> frozenset[str]:
    """Return the names that gradients and rates in *loop* are computed from, and those that decide about a step, a file or the end."""
    nodes = list(ast.walk(loop))
    found: set[str] = _read_in(loop.test) if isinstance(loop, ast.While) else set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "backward":
                found |= _read_in(node)
            elif node.func.attr == "step":
                # The measure of a ReduceLROnPlateau; `run.step` has none but by name.
                found |= set().union(*map(_read_in, node.args))
        elif isinstance(node, ast.Assign) and any(map(_is_rate, node.targets)):
            found |= _read_in(node.value)
        elif isinstance(node, ast.If) and any(map(_learns, (*node.body, *node.orelse))):
            found |= _read_in(node.test)
    bound = [each for node in nodes for each in _bound_in(node)]
    # A best loss decides about the patience.
    bound += [
        (each, node.test) for node in nodes if isinstance(node, ast.If) for each in node.body + node.orelse
    ]
    grows = True
    while grows:
        before = len(found)
        for target, value in bound:
            if found & _assigned_in(target):
                found |= _read_in(value)
        grows = len(found) > before
    timed = [target for target, value in bound if _read_in(value) & _CLOCKS]
    found |= {name for name in _with_old_last_items(nodes) if f"{name}[-1]" in found}
    return frozenset(found.difference(*(_assigned_in(target) for target in timed)))


def _with_old_last_items(nodes: list[ast.AST]) -> set[str]:
    """Return the lists of which a pass reads the last item, `losses[-1]`, and has not appended it before."""
    read = {ast.unparse(each.value): each.lineno for each in reversed(nodes) if _is_last(each)}
    appended = {
        ast.unparse(each.value): each.lineno
        for each in nodes
        if isinstance(each, ast.Attribute) and each.attr == "append"
    }
    return {name for name, line in read.items() if appended.get(name, math.inf) > line}


def _bound_in(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what *node* assigns to, with the value of each: `a, b = b, a` has two."""
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        value = node.value
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _read_in(node: ast.AST) -> set[str]:
    """Return the variables that *node* reads, and paths of attributes; with [-1] those of which it reads the last item."""
    lasts = [each for each in ast.walk(node) if _is_last(each)]
    whole = {id(inner) for each in lasts for inner in ast.walk(each.value)}
    return {ast.unparse(each) for each in lasts} | {
        ast.unparse(each)
        for each in ast.walk(node)
        if _is_path(each) and isinstance(each.ctx, ast.Load) and id(each) not in whole
    }


def _is_last(node: ast.AST) -> TypeGuard[ast.Subscript]:
    """Return True for `losses[-1]`."""
    return isinstance(node, ast.Subscript) and _is_path(node.value) and ast.unparse(node.slice) == "-1"


def _is_path(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _assigned_in(node: ast.AST) -> set[str]:
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _is_rate(target: ast.AST) -> bool:
    """Return True for `group["lr"]`."""
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == "lr"
    )


def _learns(node: ast.AST) -> bool:
    """Return True if a gradient is made in *node*, a rate is set, an optimizer or a schedule steps, a file is saved, or the loop ends."""
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    sets = (each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store))
    return (
        isinstance(node, ast.Break)
        or any(map(_is_rate, sets))
        or any(
            "save" in name or (name in {"backward", "step", "stop"} and isinstance(each, ast.Attribute))
            for each in called
            for name in [str(getattr(each, "attr", getattr(each, "id", "")))]
        )
    )


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
        if not isinstance(node, (*_CHOICES, *FUNCTIONS, *_COMPREHENSIONS)):
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
    if isinstance(node, FUNCTIONS):
        return
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Load)
        return
    if isinstance(node, _COMPREHENSIONS):
        inside = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        own = {each.id for each in inside if isinstance(each.ctx, ast.Store)}
        yield from ((each.id, True) for each in inside if each.id not in own)
        return
    if isinstance(node, ast.If):
        # A branch does not see the names that the other one assigns.
        yield from _uses(node.test)
        branches = [[use for part in branch for use in _uses(part)] for branch in (node.body, node.orelse)]
        firsts = dict(reversed(branches[1]))
        yield from ((name, True) for name, is_read in firsts.items() if is_read)
        yield from itertools.chain(*branches)
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
