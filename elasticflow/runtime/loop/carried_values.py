"""Finds variables by which one pass of a script's loop leaves values to the next: a prefetched batch, an agent's observation.

A restart makes what stands before the loop again, and continues with that. The script's source tells which names a loop
reads before it assigns them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elasticflow.runtime.loop.script_loops import FUNCTIONS, loops_around, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

_CHOICES = (ast.If, ast.IfExp, ast.Try, ast.Match)
_OURS = {"kept", "position", "end", "number"}
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic"}
_LOOPS = {"epochs", "steps", "batches"}
_WEIGHTS = {"parameters", "named_parameters", "state_dict"}
_SHOWS = ("save", "log", "print", "write", "eval", "valid", "test")
_FILLS = {"copy_", "fill_", "normal_", "uniform_", "zero_"}
_UPDATES = {"add_", "clamp_", "div_", "lerp_", "mul_", "sub_"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Roles(NamedTuple):
    """Paths in the calls of a loop, as arguments or as owners of methods, by the kind of object that is there.

    Attributes:
        with_state: Objects with a `load_state_dict`, models and optimizers among them.
    """

    models: frozenset[str]
    optimizers: frozenset[str]
    with_state: frozenset[str]


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
    file = frame.f_code.co_filename
    variables = {**frame.f_globals, **frame.f_locals}
    used: set[str] = set()
    for loop in loops_around(file, line):
        used |= _used_in(loop, variables)
    for name in sorted(used.intersection(_names(file, line)) - set_by_the_run(file)):
        value = as_number(variables.get(name))
        if value is not None:
            yield name, value


def as_number(value: Any) -> int | float | None:
    """Return a number, or that of a tensor or NumPy scalar; None for all else."""
    is_plain = type(value) is Tensor and value.device.type != "meta"
    if isinstance(value, np.number) or (is_plain and value.numel() == 1):
        value = value.item()
    return value if isinstance(value, int | float) else None


class Enumerated(NamedTuple):
    """A loop over `enumerate(...)`, or `zip(range(...), ...)`, that begins at the same number each time.

    Attributes:
        counter: Variable of the number; None: it has no name of its own.
        is_learned_from: A gradient, a rate or a step depends on the number.
    """

    counter: str | None
    is_learned_from: bool


def enumerated_at(frame: FrameType | None) -> Enumerated | None:
    """Return the loop over `enumerate(...)` in whose head *frame* is, or a caller, as where a progress bar fetches the batch."""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for loop in loops_around(file, line):
            if (
                isinstance(loop, ast.For)
                and line <= (loop.iter.end_lineno or 0)
                and _is_enumerated(file, loop)
            ):
                first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
                counter = first.id if isinstance(first, ast.Name) else None
                used = _used_in(loop, {**frame.f_globals, **frame.f_locals})
                return Enumerated(counter, counter in used)
        # A progress bar, or a generator of the script's, fetches the batch for its caller.
        frame = frame.f_back if frame.f_code.co_flags & inspect.CO_GENERATOR else None
    return None


def _is_enumerated(file: str, loop: ast.For) -> bool:
    """Return True if *loop* is over `enumerate(...)`, `zip(range(...), ...)` or a variable made of it that does not begin where the run stands."""
    head: ast.AST = loop.iter
    if isinstance(head, ast.Name):
        made = [
            node
            for node in nodes_of(file)
            if isinstance(node, ast.Assign)
            and node.lineno < loop.lineno
            and any(isinstance(each, ast.Name) and each.id == head.id for each in node.targets)
        ]
        head = max(made, key=lambda node: node.lineno).value if made else head
    for call in (each for each in ast.walk(head) if isinstance(each, ast.Call) and each.args):
        name = getattr(call.func, "id", "")
        if name not in {"enumerate", "zip"}:
            continue
        first, *starts = _arguments_of(call)
        if name == "zip":
            if not isinstance(first, ast.Call) or _name_of(first.func) not in {"range", "count"}:
                return False
            starts = [first]
        return not any(_reads(each, _OURS) or _read_in(each) & set_by_the_run(file) for each in starts)
    return False


def deciders_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a step, the end or a file of the loops around *line* depends on, by path, `self.stopper`, with the object that has it."""
    loops = loops_around(frame.f_code.co_filename, line)
    variables = {**frame.f_globals, **frame.f_locals}
    # A loop that assigns first what it reads carries nothing.
    carried = {name for loop in loops for name, is_read in _uses_in(loop)[1].items() if is_read}
    paths: set[str] = set()
    for loop in loops:
        paths |= _learned_from(loop) | _given_models(loop, _roles_in(loop, variables).models)
    found: dict[str, tuple[Any, Any]] = {}
    for path in sorted(paths):
        value, owner = _value_at(path, variables), _value_at(path.rpartition(".")[0], variables)
        # A flag may be set by a callback, too.
        is_new = not isinstance(value, bool) and any(_is_assigned_first(loop, path) for loop in loops)
        if path.partition(".")[0] in carried and not is_new:
            found[path] = value, owner
    for path, (value, owner) in found.items():
        inside = [each for inner, (each, _) in found.items() if inner.startswith(f"{path}.")]
        # These are looked at where nothing else of an object is read.
        is_numbers = inside and all(type(each) in (int, float, np.float64) for each in inside)
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
        _name_of(each)
        for node in nodes_of(file)
        if isinstance(node, ast.Assign)
        and (_reads(node.value, _OURS) or (isinstance(node.value, ast.Name) and node.value.id in counted))
        for target in node.targets
        for each in ast.walk(target)
        if isinstance(getattr(each, "ctx", None), ast.Store)
    )


def _name_of(place: ast.AST) -> str:
    """Return the end of a path: `step` of `step` and of `self.step`, `['step']` of `state["step"]`."""
    if isinstance(place, ast.Subscript):
        return f"[{ast.unparse(place.slice)}]"
    return str(getattr(place, "attr", getattr(place, "id", "")))


@cache
def accumulated_by(kind: Any) -> Mapping[str, bool]:
    """Return the attributes that methods of a class compute from their own values, and whether by a method of torch in place.

    So a running mean does, or a history that moves up. A class with a `reset` has none: that is how meters are written.
    """
    if hasattr(kind, "reset"):
        return {}
    files = {
        (base.__name__, each.__code__.co_filename)
        for base in kind.__mro__
        for each in vars(base).values()
        if isinstance(each, FunctionType)
    }
    classes = [
        node
        for name, file in files
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    found: dict[str, bool] = {}
    for method in (each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)):
        nodes = list(ast.walk(method))
        for target, value, is_in_place in _updates_in(nodes):
            path = ast.unparse(target)
            if _is_path(target) and path.startswith("self.") and path in _grown(_read_in(value), nodes):
                found[path.removeprefix("self.")] = is_in_place
    return found


def _updates_in(nodes: list[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST, bool]]:
    """Yield what *nodes* compute anew, or in place by a method of torch, with what it is computed from."""
    for node in nodes:
        if isinstance(node, ast.AugAssign):
            yield _whole_of(node.target), _read_again(node.target), False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node):
            place = _whole_of(node.func.value)
            given = ast.Tuple(elts=_arguments_of(node), ctx=ast.Load())
            yield place, given if node.func.attr in _FILLS else _read_again(place), True
        for target, value in _bound_in(node):
            # A storage computes one row from the next; a history moves all of them up.
            if isinstance(target, ast.Subscript) and not any(
                isinstance(each, ast.Slice) for each in ast.walk(target.slice)
            ):
                continue
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield _whole_of(each), value, False


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
def _indices_in(loop: ast.For | ast.While) -> frozenset[str]:
    """Return the names by which a pass of *loop* finds items."""
    places = (
        each for each in ast.walk(loop) if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Load)
    )
    return frozenset(
        each.id for place in places for each in ast.walk(place.slice) if isinstance(each, ast.Name)
    )


@cache
def _learned_from(loop: ast.For | ast.While) -> frozenset[str]:
    """Return the names that gradients, rates and weights in *loop* are computed from, and those that decide about a step, a file or the end."""
    nodes = list(ast.walk(loop))
    found: set[str] = _read_in(loop.test) if isinstance(loop, ast.While) else set()
    for node in nodes:
        if isinstance(node, ast.For | ast.While):
            found |= set().union(*map(_read_in, _tests_of_continue(node.body)))
        if (
            isinstance(node, ast.For)
            and _reads(node.iter, _WEIGHTS)
            and any(map(_is_in_place, ast.walk(node)))
        ):
            found |= set().union(*map(_read_in, node.body))
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
    found = _grown(found, nodes)
    timed = [target for node in nodes for target, value in _bound_in(node) if _read_in(value) & _CLOCKS]
    found |= {name for name in _with_old_last_items(nodes) if f"{name}[-1]" in found}
    return frozenset(found.difference(*(_assigned_in(target) for target in timed)))


def _grown(found: set[str], nodes: list[ast.AST]) -> set[str]:
    """Return the names in *found*, and those that *nodes* compute them from."""
    found = set(found)
    bound = [each for node in nodes for each in _bound_in(node)]
    # A best loss decides about the patience.
    bound += [
        (each, node.test) for node in nodes if isinstance(node, ast.If) for each in node.body + node.orelse
    ]
    grows = True
    while grows:
        before = len(found)
        for target, value in bound:
            # `advantages[t] = ...` binds an item of what is read as a whole.
            is_item = isinstance(target, ast.Subscript) and ast.unparse(_whole_of(target)) in found
            if is_item or found & _assigned_in(target):
                found |= _read_in(value)
        grows = len(found) > before
    return found


def _tests_of_continue(block: list[ast.stmt]) -> Iterator[ast.expr]:
    """Yield the conditions under which `continue` leaves out the rest of *block*, by which a pass learns."""
    for number, each in enumerate(block, start=1):
        if (
            isinstance(each, ast.If)
            and any(isinstance(node, ast.Continue) for node in each.body)
            and any(map(_learns, block[number:]))
        ):
            yield each.test


def _used_in(loop: ast.For | ast.While, variables: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that a step of *loop* depends on: it learns from them, is given them, or finds items by them."""
    return _learned_from(loop) | _given_to_steps(loop, _roles_in(loop, variables)) | _indices_in(loop)


@cache
def _given_to_steps(loop: ast.For | ast.While, roles: _Roles) -> frozenset[str]:
    """Return the names in the arguments of models, of methods of an object with a state, and of functions that get an optimizer or two models."""
    nodes = list(ast.walk(loop))
    found: set[str] = set()
    for call in (each for each in nodes if isinstance(each, ast.Call)):
        arguments = _arguments_of(call)
        paths, called = set(map(ast.unparse, arguments)), ast.unparse(call.func)
        owner, _, name = called.rpartition(".")
        is_step = bool(paths & roles.optimizers) or len(paths & roles.models) > 1
        is_shown = any(each in name.lower() for each in _SHOWS)
        if called in roles.models or owner in roles.with_state or (is_step and not is_shown):
            found |= set().union(*map(_read_in, arguments))
    return frozenset(_grown(found, nodes))


@cache
def _given_models(loop: ast.For | ast.While, models: frozenset[str]) -> frozenset[str]:
    """Return the paths of objects of which a method gets a model, or its parameters, as an average of the weights does."""
    return frozenset(
        ast.unparse(call.func.value)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and any(ast.unparse(each).removesuffix(".parameters()") in models for each in _arguments_of(call))
    )


def _roles_in(loop: ast.For | ast.While, variables: Mapping[str, Any]) -> _Roles:
    values = {path: _value_at(path, variables) for path in _paths_of_calls(loop)}
    return _Roles(
        frozenset(path for path, value in values.items() if isinstance(value, nn.Module)),
        frozenset(path for path, value in values.items() if isinstance(value, Optimizer)),
        frozenset(
            p for p, value in values.items() if callable(getattr(type(value), "load_state_dict", None))
        ),
    )


@cache
def _paths_of_calls(loop: ast.For | ast.While) -> frozenset[str]:
    calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)]
    places = [place for call in calls for place in (*_arguments_of(call), call.func)]
    inner = [each for place in places for each in ast.walk(place) if _is_path(each)]
    return frozenset(map(ast.unparse, inner))


def _arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _value_at(path: str, variables: Mapping[str, Any]) -> Any:
    """Return what lies at *path*, `self.stopper`; None if nothing does."""
    first, *attributes = path.split(".")
    value = variables.get(first)
    for attribute in attributes:
        value = getattr(value, "__dict__", {}).get(attribute)
    return value


@cache
def _is_assigned_first(loop: ast.For | ast.While, path: str) -> bool:
    """Return True if a pass assigns the attribute at *path* in a line before all lines that read it."""
    places = [
        each for each in ast.walk(loop) if isinstance(each, ast.Attribute) and ast.unparse(each) == path
    ]
    added = [each.target.lineno for each in ast.walk(loop) if isinstance(each, ast.AugAssign)]
    read = [each.lineno for each in places if isinstance(each.ctx, ast.Load) or each.lineno in added]
    assigned = [each.lineno for each in places if isinstance(each.ctx, ast.Store)]
    return bool(assigned) and min(assigned) < min(read, default=math.inf)


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
    """Return True for `group["lr"]`, or another option of an optimizer's group."""
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value in {"lr", "weight_decay", "momentum", "betas"}
    )


def _learns(node: ast.AST) -> bool:
    """Return True if a gradient is made or taken away in *node*, a rate is set, an optimizer or a schedule steps, a file is saved, or the loop ends."""
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    sets = (each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store))
    return (
        isinstance(node, ast.Break)
        or any(_is_rate(each) or getattr(each, "attr", "") == "grad" for each in sets)
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


def _is_in_place(node: ast.AST) -> bool:
    """Return True for a call of a method of torch that changes its tensor, `weight.copy_(...)`, or for `weight.data = ...`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    return isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store)


def _whole_of(place: ast.AST) -> ast.AST:
    """Return the variable or attribute of which *place* is an item or its data: `self.history` of `self.history[0].data`."""
    while isinstance(place, ast.Subscript) or (isinstance(place, ast.Attribute) and place.attr == "data"):
        place = place.value
    return place


def _read_again(place: ast.AST) -> ast.AST:
    """Return *place* as an expression that reads it."""
    return ast.parse(ast.unparse(_whole_of(place)), mode="eval").body


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
    place = _whole_of(place)
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
