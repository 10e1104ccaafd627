"""Finds variables by which one pass of a script's loop leaves values to the next: a prefetched batch, an agent's observation.

A restart runs the code before the loop again, and continues with its values. The script's source tells which values a pass reads
before it assigns them, and which of them a step depends on (`liveness.py`).
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import ChainMap
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from elasticflow.runtime.loop.liveness import (
    Pass,
    arguments_of,
    changes_in,
    depends_on_itself,
    end_of,
    flows_in,
    made_in_branches,
    owner_of,
    passes_around,
    path_of,
    read_in,
    shown_in,
    used_in,
)
from elasticflow.runtime.loop.script_loops import loops_around, nodes_of, scope_of
from elasticflow.runtime.process import reachable
from elasticflow.system.exceptions import is_own_code
from elasticflow.system.installation import is_of_installed_package

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from types import FrameType

_OURS = {"kept", "position", "end", "number"}
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic"}
_LOOPS = {"epochs", "steps", "batches"}
# Fewer than `liveness` takes for showing: nothing is told of a number that is only shown by these.
_TELLS = ("log", "print", "add_scalar", "set_postfix", "set_description")
_MOST_FILES = 200
"""Files that are read for the uses of a number."""
# By code of a function, and whether its result is used: the variables that one call leaves to the next.
_BY_FUNCTION: dict[tuple[CodeType, bool], list[str]] = {}


def carried_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and shuffled lists that the loops around *line* of *frame* carry, by variable.

    Not those that are only shown. For a single number, which is often a sum, see `counted_in`. Another list is often a record.
    """
    file = frame.f_code.co_filename
    shown = frozenset().union(*map(shown_in, loops_around(file, line)))
    value_at, passes = _values_of(frame), passes_around(file, line)
    only_shown = shown - _carried(passes_around(file, line, value_at))
    changed = _changed_by_calls(file, line, value_at) & frozenset().union(*(each.head for each in passes))
    for name in (_carried(passes) | changed) - only_shown:
        value = frame.f_locals.get(name)
        if isinstance(value, dict) and any(
            is_several_numbers(leaf.value) for leaf in reachable.leaves({name: value}, {})
        ):
            yield name, value
        for each in value if isinstance(value, tuple) else (value,):
            if is_several_numbers(each) or (isinstance(each, list) and name in _shuffled(file)):
                yield name, each


def counted_in(frame: FrameType, line: int) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that the loops around *line* carry, and that a gradient, a rate, an index, a model or a file depends on.

    Those that are only printed are not among them.
    """
    file, value_at = frame.f_code.co_filename, _values_of(frame)
    for name in sorted(_carried(passes_around(file, line, value_at)) - set_by_the_run(file)):
        value = as_number(value_at(name)) if name.isidentifier() else None
        if value is not None:
            yield name, value


def deciders_in(frame: FrameType, line: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a step, the end or a file of the loops around *line* depends on, by path, `self.stopper`, with the object that has it."""
    value_at = _values_of(frame)
    # A function that gets the optimizer gets meters, too.
    passes = passes_around(frame.f_code.co_filename, line, value_at, by_arguments=False)
    paths = {path.removesuffix("[-1]") for each in passes for path in each.head}
    # A flag that a pass sets may be set by a callback, too.
    paths |= {path for each in passes for path in each.ends if isinstance(value_at(path), bool)}
    found = {path: value_at(path) for path in sorted(paths)}
    for path, value in found.items():
        inside = [each for inner, each in found.items() if inner.startswith((f"{path}.", f"{path}["))]
        # These are looked at where nothing else of an object is read.
        is_numbers = inside and all(type(each) in (int, float, np.float64) for each in inside)
        if value is not None and not is_numbers:
            yield path, value, value_at(owner_of(path))


def carried_by_functions(frame: FrameType, line: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables outside of functions by which one call leaves a value to the next, as `deciders_in` does.

    A function that the loops around *line* call has them as `global` or `nonlocal`, or in a dict or an object.
    """
    file, value_at = frame.f_code.co_filename, _values_of(frame)
    used = frozenset().union(*(each.head for each in passes_around(file, line, value_at, by_arguments=False)))
    for name in sorted({ast.unparse(call.func) for call in _calls_at(file, line)}):
        function = _own_function(value_at(name))
        if function is None:
            continue
        held = {path[1:]: each for path, each in reachable.inside_of("", function, {})}  # by `.name`
        inside = _values_in(ChainMap(held, function.__globals__))
        for path in _carried_by(function.__code__, inside, is_result_used=name in used):
            yield path, inside(path), inside(owner_of(path))


def _carried_by(code: CodeType, value_at: Callable[[str], Any], *, is_result_used: bool) -> list[str]:
    if (code, is_result_used) not in _BY_FUNCTION:
        own = {*code.co_varnames, *code.co_cellvars}
        _BY_FUNCTION[code, is_result_used] = [
            path
            for node in _definitions_of(code)
            for path in sorted({flow.path for flow in flows_in(*node.body)})
            if path.partition(".")[0].partition("[")[0] not in own
            and path in used_in(node, value_at, is_result_used=is_result_used)
            and depends_on_itself(node, path)
        ]
    return _BY_FUNCTION[code, is_result_used]


def _changed_by_calls(file: str, line: int, value_at: Callable[[str], Any]) -> set[str]:
    """Return the variables that the loops around *line* give to functions which compute them from themselves, in place: a pool of samples."""
    found: set[str] = set()
    for call in _calls_at(file, line):
        function = _own_function(value_at(ast.unparse(call.func)))
        if function is not None:
            changed = _changed_by(function.__code__)
            given = zip(function.__code__.co_varnames, call.args, strict=False)
            found |= {path_of(each) for name, each in given if name in changed}
    return found


@cache
def _changed_by(code: CodeType) -> frozenset[str]:
    flows = [(node, flow) for node in _definitions_of(code) for flow in flows_in(*node.body)]
    assigned = (flow for _, flow in flows if isinstance(flow.target, ast.Name))
    bound = {flow.path for flow in assigned if not flow.is_call and not flow.keeps}
    return frozenset(
        flow.path for node, flow in flows if flow.path not in bound and depends_on_itself(node, flow.path)
    )


def _own_function(value: Any) -> FunctionType | None:
    """Return a function of the script's, without its decorators; None for all else."""
    function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    is_own = isinstance(function, FunctionType) and is_own_code(function.__code__.co_filename)
    return function if is_own else None


def _definitions_of(code: CodeType) -> list[ast.FunctionDef]:
    # A function begins in the line of its first decorator.
    return [
        node
        for node in nodes_of(code.co_filename)
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name
        if code.co_firstlineno == min([node.lineno, *(each.lineno for each in node.decorator_list)])
    ]


@cache
def _calls_at(file: str, line: int) -> tuple[ast.Call, ...]:
    """Return the calls in the loops around *line*."""
    nodes = (each for loop in loops_around(file, line) for each in ast.walk(loop))
    return tuple(each for each in nodes if isinstance(each, ast.Call))


@cache
def made_in_each_pass(file: str, line: int) -> frozenset[str]:
    """Return the variables that a pass of a loop around *line*, or a branch inside of it, makes anew before they are read."""
    loops = loops_around(file, line)
    found: set[str] = set()
    for number, each in enumerate(passes_around(file, line)):
        # The passes of an inner loop leave it to each other.
        inside = (node for inner in loops[number + 1 :] for node in ast.walk(inner))
        found |= each.always - each.head - _names_in(inside)
        found |= made_in_branches(loops[number], scope_of(file, line))
    return frozenset(found)


@cache
def made_for_inner_loops(file: str, line: int) -> frozenset[str]:
    """Return the variables that a pass of a loop around *line* makes anew, and that the loops inside of it do not assign."""
    passes = passes_around(file, line)
    found: set[str] = set()
    for number, each in enumerate(passes):
        inside = frozenset().union(*(inner.written for inner in passes[number + 1 :]))
        found |= each.always - each.head - inside
    return frozenset(found)


def as_number(value: Any) -> int | float | None:
    """Return a number, or that of a tensor or NumPy scalar; None for all else."""
    is_plain = type(value) is Tensor and value.device.type != "meta"
    if isinstance(value, np.number) or (is_plain and value.numel() == 1):
        value = value.item()
    return value if isinstance(value, int | float) else None


def is_several_numbers(value: Any) -> bool:
    """Return True for a tensor or an array of two or more numbers."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return isinstance(value, Tensor | np.ndarray) and size > 1


class Enumerated(NamedTuple):
    """A loop over `enumerate(...)`, or `zip(range(...), ...)`, that begins at the same number each time.

    Attributes:
        counter: Variable of the number; None: it has no name of its own.
        is_learned_from: A gradient, a rate or a step depends on the number.
    """

    counter: str | None
    is_learned_from: bool


def enumerated_at(frame: FrameType | None) -> Enumerated | None:
    """Return the loop over `enumerate(...)` in whose head *frame* is; or one of its callers, if a generator such as a progress bar fetches the batch."""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        passes = passes_around(file, line, _values_of(frame))
        for loop, each in zip(loops_around(file, line), passes, strict=True):
            if (
                isinstance(loop, ast.For)
                and line <= (loop.iter.end_lineno or 0)
                and _is_enumerated(file, loop)
            ):
                first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
                counter = first.id if isinstance(first, ast.Name) else None
                return Enumerated(counter, counter in each.body)
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
        first, *starts = arguments_of(call)
        if name == "zip":
            if not isinstance(first, ast.Call) or _end_of(first.func) not in {"range", "count"}:
                return False
            starts = [first]
        names = _names_in(node for start in starts for node in ast.walk(start))
        return not names & set_by_the_run(file) and not any(_reads(each, _OURS) for each in starts)
    return False


@cache
def set_by_the_run(file: str) -> frozenset[str]:
    """Return the variables and attributes that a file sets from `Run.position`, `Run.kept`, a batch, the number of an epoch, or a clock.

    They are right after a restart.
    """
    loops = (node for node in nodes_of(file) if isinstance(node, ast.For) and _reads(node.iter, _LOOPS))
    counted, clocks = {ast.unparse(loop.target) for loop in loops}, set(_CLOCKS)
    found: set[str] = set()
    assigned = (node for node in nodes_of(file) if isinstance(node, ast.Assign))
    for flow in (each for node in assigned for each in flows_in(node) if not each.is_call):
        value = flow.sources[0]
        is_timed = bool(read_in(value) & clocks)
        if is_timed or _reads(value, _OURS) or ast.unparse(value) in counted:
            found.add(_end_of(flow.target))
        clocks |= {flow.path} if is_timed else set()
    return frozenset(found)


def _classes_of(kind: type) -> set[tuple[str, str]]:
    """Return the names of a class and of its base classes, and the files of their methods."""
    return {
        (base.__name__, each.__code__.co_filename)
        for base in kind.__mro__
        for each in vars(base).values()
        if isinstance(each, FunctionType)
    }


def is_made_anew(path: str, owner: Any, files: Collection[str]) -> bool | None:
    """Return True if *files*, and those of the owner's class, set the value at *path* without reading the old one; None if they do not set it."""
    known = {*files, *(file for _, file in _classes_of(type(owner)))}
    changes = [changes_in(file) for file in known if not is_of_installed_package(file)]
    if any(end_of(path) in carried for _, carried in changes):
        return False
    return True if any(end_of(path) in changed for changed, _ in changes) else None


def own_files() -> set[str]:
    """Return the files of the script's own modules that are loaded."""
    # `each.__file__` of a lazy module would import others.
    files = [getattr(each, "__dict__", {}).get("__file__") for each in list(sys.modules.values())]
    return {file for file in files if isinstance(file, str) and is_own_code(file)}


def is_only_shown(path: str, files: Collection[str]) -> bool:
    """Return True if *files* print or log the value at *path*, and do nothing else with it.

    A value that nothing reads by its name may be meant for a library.
    """
    if len(files) > _MOST_FILES:
        return False
    reads = [_reads_in(file) for file in files]
    is_shown = any(end_of(path) in shown for shown, _ in reads)
    return is_shown and not any(end_of(path) in used for _, used in reads)


@cache
def _reads_in(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ends of paths of attributes and items that *file* reads: first those in statements that only show them, then all others."""
    shows = {id(each) for node in nodes_of(file) if _only_shows(node) for each in ast.walk(node)}
    shown: set[str] = set()
    used: set[str] = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            (shown if id(node) in shows else used).add(_end_of(node))
    return frozenset(shown), frozenset(used)


def _only_shows(node: ast.AST) -> bool:
    """Return True for `print(...)` or `logger.log(...)` whose result nothing takes, and for a condition of nothing else."""
    if isinstance(node, ast.If):
        return all(map(_only_shows, [*node.body, *node.orelse]))
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return any(word in _end_of(node.value.func) for word in _TELLS)


@cache
def accumulated_by(kind: Any) -> Mapping[str, bool]:
    """Return the attributes that methods of a class compute from their own values, and whether by a method of torch in place.

    So a running mean does, or a history that moves up. A class with a `reset` has none: that is how meters are written.
    """
    if hasattr(kind, "reset"):
        return {}
    bodies = [
        node.body
        for name, file in _classes_of(kind)
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    methods = [each for body in bodies for each in body if isinstance(each, ast.FunctionDef)]
    changes = [(method, flow) for method in methods for flow in flows_in(*method.body)]
    filled = {
        flow.path
        for method, flow in changes
        if isinstance(flow.target, ast.Subscript) and not depends_on_itself(method, flow.path)
    }
    return {
        flow.path.removeprefix("self."): flow.is_call
        for method, flow in changes
        # A storage computes one row from the next, or scales what it was filled with; a history moves all rows up.
        if flow.path.startswith("self.") and flow.path not in filled and not flow.is_of_row
        if depends_on_itself(method, flow.path)
    }


def _carried(passes: Iterable[Pass]) -> frozenset[str]:
    """Return what *passes* use before they change it."""
    return frozenset().union(*(each.head & each.written for each in passes))


@cache
def _shuffled(file: str) -> frozenset[str]:
    """Return the variables that a file gives to a function `shuffle`, which changes them in place."""
    calls = [node for node in nodes_of(file) if isinstance(node, ast.Call) and node.args]
    return frozenset(ast.unparse(call.args[0]) for call in calls if _end_of(call.func) == "shuffle")


def _values_of(frame: FrameType) -> Callable[[str], Any]:
    """Return a function that returns the value at a path, `self.stopper` or `state['step']`, in *frame*; None if there is none."""
    return _values_in({**frame.f_globals, **frame.f_locals})


def _values_in(variables: Mapping[str, Any]) -> Callable[[str], Any]:
    def value_at(path: str) -> Any:
        if not (owner := owner_of(path)):
            return variables.get(path)
        held, name = value_at(owner), end_of(path)
        if name.startswith(("['", '["')):
            return held.get(name[2:-2]) if isinstance(held, dict) else None
        return getattr(held, "__dict__", {}).get(name)

    return value_at


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {each.id for each in nodes if isinstance(each, ast.Name)}


def _reads(node: ast.AST, attributes: set[str]) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in attributes for each in ast.walk(node))


def _end_of(place: ast.AST) -> str:
    """Return the end of a path: `step` of `step` and of `self.step`, `['step']` of `state["step"]`."""
    if isinstance(place, ast.Subscript):
        return f"[{ast.unparse(place.slice)}]"
    return str(getattr(place, "attr", getattr(place, "id", "")))
