"""Reads a pass of a script's loop backwards: values at its beginning that a gradient, a rate, a file or the end is computed from.

Compilers call such values strongly live. A condition is read as if one of its branches assigned, an inner loop as if it made a pass.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from elasticflow.runtime.loop.script_loops import FUNCTIONS, loops_around, nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

_WEIGHTS = {"parameters", "named_parameters", "state_dict"}
_SHOWS = ("log", "print", "write", "add_", "set_")
_LOOKS = (*_SHOWS, "save", "eval", "valid", "test")
_FILLS = {"copy_", "fill_", "normal_", "resize_", "uniform_", "zero_"}
_FLAGS = {"requires_grad_", "share_memory_"}
_CHOICES = (ast.If, ast.IfExp, ast.Try, ast.Match)
_TESTS = (ast.Compare, ast.BoolOp)
_RATES = {"['lr']", "['weight_decay']", "['momentum']", "['betas']", "grad"}
_STEPS = {"backward", "step", "stop"}

_PASSES: dict[tuple[str, int, bool, bool], tuple[Pass, ...]] = {}

Loop = ast.For | ast.While


class Pass(NamedTuple):
    """A pass of a loop.

    Attributes:
        head: Variables and paths, `self.best`, of which the value at the beginning is used; `losses[-1]`, if only the last item is.
        body: The same behind the loop's head, with the variables that it sets.
        written: Variables and paths that are assigned, or changed in place.
        always: Variables that are assigned under no condition, or begin anew by a seed.
        ends: Attributes by which the loop is left, those that the pass sets too.
    """

    head: frozenset[str]
    body: frozenset[str]
    written: frozenset[str]
    always: frozenset[str]
    ends: frozenset[str]


class Flow(NamedTuple):
    """A change of the value at a path: `x = a`, `x += a`, `x[i] = a`, `x.data = a`, `x.copy_(a)`, `x.mul_(a)`, `xs.append(a)`.

    Attributes:
        sources: Expressions that the new value is computed from.
        keeps: The old value is one of them.
    """

    path: str
    target: ast.expr
    sources: list[ast.expr]
    keeps: bool
    is_call: bool = False

    @property
    def is_of_row(self) -> bool:
        """True for `x[i] = a`, of which other rows of x stay as they are."""
        if not isinstance(self.target, ast.Subscript) or self.keeps:
            return False
        return not any(isinstance(each, ast.Slice) for each in ast.walk(self.target.slice))


def passes_around(
    file: str, line: int, value_at: Callable[[str], Any] | None = None, *, by_arguments: bool = True
) -> tuple[Pass, ...]:
    """Return the passes of the loops around *line*, the outermost first.

    Args:
        value_at: Returns the value at a path. None: each read counts as a use.
        by_arguments: Indices, and arguments of models and of functions that get an optimizer, count as used.
    """
    key = file, line, value_at is None, by_arguments
    if key not in _PASSES:
        reader = _Backwards(
            value_at, counts_all=value_at is None, by_arguments=by_arguments, flags=_flags_in(file)
        )
        loops = loops_around(file, line)
        for loop in loops:
            if loop not in reader.passes:
                reader.read_loop(loop, set(), counts=True)
        _PASSES[key] = tuple(reader.passes[loop] for loop in loops)
    return _PASSES[key]


@cache
def changes_in(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ends of paths of attributes and items: all that *file* changes, and all that a function or a loop reads and then changes."""
    changed: set[str] = set()
    carried: set[str] = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.For | ast.While):
            written = {each for each in _written(node.body) if not each.isidentifier()}
            changed |= written
            carried |= written & _Backwards(counts_all=True).read_block(node.body, set())
    return frozenset(map(end_of, changed)), frozenset(map(end_of, carried))


@cache
def _flags_in(file: str) -> frozenset[str]:
    """Return the variables that *file* sets by a comparison: `is_best = accuracy > best`."""
    flows = (flow for node in nodes_of(file) if isinstance(node, ast.Assign) for flow in _flows_of(node))
    return frozenset(flow.path for flow in flows if isinstance(flow.sources[0], _TESTS))


@cache
def shown_in(loop: Loop) -> frozenset[str]:
    """Return the variables that a pass of *loop* prints, logs, or shows in a progress bar."""
    calls = (each for each in _walk(*loop.body) if isinstance(each, ast.Call))
    shows = (each for each in calls if any(word in _name_of(each.func) for word in _SHOWS))
    return frozenset().union(*(read_in(*arguments_of(each)) for each in shows))


def made_in_branches(loop: Loop, scope: Iterable[ast.AST]) -> set[str]:
    """Return the variables that a branch of a condition in *loop* makes before it reads them, and that nothing else in *scope* names."""
    everywhere = Counter(each.id for each in scope if isinstance(each, ast.Name))
    conditions = [each for each in _walk(*loop.body) if isinstance(each, ast.If)]
    found: set[str] = set()
    for branch in (branch for each in conditions for branch in (each.body, each.orelse)):
        names = (each for node in branch for each in ast.walk(node) if isinstance(each, ast.Name))
        inside = Counter(each.id for each in names)
        made = {each.path for each in flows_in(*branch, but=_CHOICES) if isinstance(each.target, ast.Name)}
        made -= _Backwards(counts_all=True).read_block(branch, set())
        found |= {name for name in made if inside[name] == everywhere[name]}
    return found


def depends_on_itself(function: ast.FunctionDef, path: str) -> bool:
    """Return True if *function* computes the new value at *path* from the old one."""
    return path in _Backwards().read_block(function.body, {path})


def used_in(function: ast.FunctionDef, value_at: Callable[[str], Any], *, is_result_used: bool) -> set[str]:
    """Return the values before a call of *function* that a gradient or a rate is computed from, or the result, if that is used."""
    returns = [each for each in _walk(*function.body) if isinstance(each, ast.Return)]
    return _Backwards(value_at).read_block(function.body, read_in(*returns) if is_result_used else set())


class _Backwards:
    """Reads statements from the last to the first.

    Attributes:
        passes: The loops that were read.
    """

    def __init__(
        self,
        value_at: Callable[[str], Any] | None = None,
        *,
        counts_all: bool = False,
        by_arguments: bool = False,
        flags: AbstractSet[str] = frozenset(),
    ) -> None:
        self._value_at, self._counts_all, self._by_arguments = value_at, counts_all, by_arguments
        self._flags = flags
        self.passes: dict[Loop, Pass] = {}

    def read_loop(self, loop: Loop, live: AbstractSet[str], *, counts: bool) -> set[str]:
        """Return the paths whose values before *loop* are used, if those of *live* are used behind it; *counts*: the loop's condition is used, too."""
        targets = {each.path for each in _flows_of(loop)}
        written, again = targets | _written(loop.body), set(live)
        while True:
            body = self.read_block(loop.body, again)
            if (
                isinstance(loop, ast.For)
                and any(_name_of(each) in _WEIGHTS for each in ast.walk(loop.iter))
                and any(map(_is_in_place, _walk(*loop.body)))
            ):
                inner = (each for each in _walk(*loop.body) if isinstance(each, ast.For))
                body |= read_in(*loop.body) - {flow.path for each in inner for flow in _flows_of(each)}
            head = _without(body, targets)
            if isinstance(loop, ast.While) and counts:
                head |= read_in(loop.test)
            if head <= again:
                break
            again |= head
        changes = flows_in(*loop.body, but=_CHOICES)
        always = {each.path for each in changes if isinstance(each.target, ast.Name) and not each.is_call}
        tests = (each for each in _walk(*loop.body) if isinstance(each, ast.If))
        ends = set().union(*(read_in(each.test) for each in tests if _has(each, ast.Break)))
        self.passes[loop] = Pass(*map(frozenset, (head, body, written, always | targets, ends)))
        iterated = read_in(loop.iter) if isinstance(loop, ast.For) and counts else set()
        return head | _without(live, written) | iterated

    def read_block(self, block: Iterable[ast.AST], live: AbstractSet[str]) -> set[str]:
        """Return the paths whose values before *block* are used, if those of *live* are used behind it."""
        live, is_learning = set(live), False
        for node in reversed(list(block)):
            # `continue` leaves out what stands behind it.
            leaves_out = is_learning and _has(node, ast.Continue)
            tested = read_in(node.test) if leaves_out and isinstance(node, ast.If) else set()
            live = self._read(node, live) | tested
            is_learning = is_learning or _learns(node)
        return live

    def _read(self, node: ast.AST, live: set[str]) -> set[str]:
        match node:
            case ast.FunctionDef() if self._value_at:
                # A closure for the optimizer makes gradients.
                return live | self.read_block(node.body, set())
            case ast.For() | ast.While():
                after = self.read_block(node.orelse, live)
                return self.read_loop(node, after, counts=self._counts(node.body, after))
            case ast.With():
                return self._read_simple(list(node.items), self.read_block(node.body, live))
            case ast.Try():
                handled = [each for handler in node.handlers for each in handler.body]
                return self.read_block([*node.body, *handled, *node.orelse, *node.finalbody], live)
            case ast.If():
                tested = read_in(node.test) if self._counts([*node.body, *node.orelse], live) else set()
                return self._read_branches([node.body, node.orelse], live) | tested
            case ast.Match():
                return self._read_branches([each.body for each in node.cases], live) | read_in(node.subject)
            case _:
                return self._read_simple([node], live)

    def _read_branches(self, branches: list[list[ast.stmt]], live: set[str]) -> set[str]:
        # A branch does not see the names that another one assigns.
        written = [_written(each) for each in branches]
        others = [set().union(*written) - each for each in written]
        seen = (self.read_block(b, _without(live, other)) for b, other in zip(branches, others, strict=True))
        return set().union(*seen)

    def _read_simple(self, parts: list[ast.AST], live: set[str]) -> set[str]:
        flows = list(flows_in(*parts))
        used: set[str] = set()
        if self._counts_all:
            # `x[i] = 0` and `x.zero_()` do not read x.
            used = read_in(*parts, outside=[each.target for each in flows])
        elif self._value_at:
            for each in _walk(*parts):
                used |= _used_by(each, self._value_at) | _decides_on_file(each, self._flags)
                used |= _given_to(each, self._value_at) if self._by_arguments else set()
        for flow in flows:
            owner = flow.path.rpartition("[")[0]
            is_used = {flow.path, owner} & live or _is_rate(flow.target)
            used |= read_in(*flow.sources) if is_used and not self._counts_all else set()
            if flow.keeps and (is_used or self._counts_all):
                # An item's old value is not all of its dict.
                used |= _beginnings_of(flow.path) - {owner}
        return _without(live, {each.path for each in flows if not each.keeps}) | used

    def _counts(self, block: list[ast.stmt], live: set[str]) -> bool:
        """Return True if something depends on whether *block* is run."""
        return self._counts_all or bool(live & _written(block)) or any(map(_learns, block))


def flows_in(*nodes: ast.AST, but: tuple[type[ast.AST], ...] = ()) -> Iterator[Flow]:
    """Yield the changes in *nodes*, but not those inside nodes of the kinds *but*."""
    for each in _walk(*nodes, but=but):
        yield from _flows_of(each)


@cache
def _flows_of(node: ast.AST) -> tuple[Flow, ...]:
    return tuple(_made_by(node))


def _made_by(node: ast.AST) -> Iterator[Flow]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _flows_to(target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield Flow(whole_of(node.target), node.target, [node.value], keeps=True)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _flows_to(node.target, node.value)
    elif isinstance(node, ast.For):
        yield from _flows_to(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _flows_to(node.optional_vars, node.context_expr)
    elif isinstance(node, ast.Call):
        yield from _flows_of_call(node)


def _flows_to(target: ast.expr, value: ast.expr) -> Iterator[Flow]:
    """Yield the changes of an assignment: `a, b = b, a` makes two."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield Flow(whole_of(target), target, [value], keeps=False)
    elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        for inner, each in zip(target.elts, value.elts, strict=True):
            yield from _flows_to(inner, each)
    else:
        for inner in target.elts:
            yield from _flows_to(inner, value)


def _flows_of_call(call: ast.Call) -> Iterator[Flow]:
    """Yield the change that a call makes in place."""
    given = arguments_of(call)
    if _name_of(call.func) == "shuffle" and given:
        yield Flow(whole_of(given[0]), given[0], [], keeps=True, is_call=True)
    if not isinstance(call.func, ast.Attribute):
        return
    owner = call.func.value
    if call.func.attr == "append":
        yield Flow(f"{whole_of(owner)}[-1]", owner, given, keeps=False, is_call=True)
    elif call.func.attr == "reset" and given:
        # An environment begins an episode, by the seed.
        yield Flow(whole_of(owner), owner, given, keeps=False)
    elif _is_in_place(call):
        fills = call.func.attr in _FILLS
        # `x.zero_().add_(1)`
        while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and _is_in_place(owner):
            fills = owner.func.attr in _FILLS
            owner = owner.func.value
        yield Flow(whole_of(owner), owner, given, keeps=not fills, is_call=True)


def _is_in_place(node: ast.AST) -> bool:
    """Return True for a call of a method of torch that changes its tensor, `weight.copy_(...)`, or for `weight.data = ...`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return (
            node.func.attr.endswith("_")
            and not node.func.attr.endswith("__")
            and node.func.attr not in _FLAGS
        )
    return isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store)


def _used_by(node: ast.AST, value_at: Callable[[str], Any]) -> set[str]:
    """Return the paths from which *node* makes a gradient, or a schedule's measure, and the object of a method that gets a model (an average)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    if node.func.attr == "backward":
        return read_in(node)
    # `run.step` has no measure but by name, a ReduceLROnPlateau has one.
    found = read_in(*node.args) if node.func.attr == "step" else set()
    given = (value_at(ast.unparse(each).removesuffix(".parameters()")) for each in arguments_of(node))
    return found | ({ast.unparse(node.func.value)} if any(isinstance(g, nn.Module) for g in given) else set())


def _decides_on_file(node: ast.AST, flags: AbstractSet[str]) -> set[str]:
    """Return the comparisons, and the *flags*, that are given to a function which saves: `save_checkpoint(state, is_best)`."""
    if not isinstance(node, ast.Call) or "save" not in _name_of(node.func):
        return set()
    given = arguments_of(node)
    return read_in(*(each for each in given if isinstance(each, _TESTS) or path_of(each) in flags))


def _given_to(node: ast.AST, value_at: Callable[[str], Any]) -> set[str]:
    """Return the arguments of models, of an object with a state, and of what gets an optimizer or two models; names in an index."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return {each.id for each in ast.walk(node.slice) if isinstance(each, ast.Name)}
    if not isinstance(node, ast.Call):
        return set()
    called = ast.unparse(node.func)
    given = [value_at(ast.unparse(each)) for each in arguments_of(node)]
    is_step = any(isinstance(g, Optimizer) for g in given) or sum(isinstance(g, nn.Module) for g in given) > 1
    is_shown = any(each in _name_of(node.func).lower() for each in _LOOKS)
    has_state = callable(getattr(type(value_at(called.rpartition(".")[0])), "load_state_dict", None))
    is_used = has_state or isinstance(value_at(called), nn.Module) or (is_step and not is_shown)
    return read_in(*arguments_of(node)) if is_used else set()


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, also those with a name."""
    return [*call.args, *(each.value for each in call.keywords)]


@cache
def path_of(node: ast.AST) -> str:
    """Return `self.best`, or `state['step']`, for an expression of this form; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    inner = path_of(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else ""
    if isinstance(node, ast.Subscript):
        key = getattr(node.slice, "value", None)
        return f"{inner}[{key!r}]" if inner and isinstance(key, str) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def end_of(path: str) -> str:
    """Return `best` of `self.best`, and `['step']` of `state['step']`."""
    return path[path.rfind("[") :] if path.endswith("]") else path.rpartition(".")[2]


def owner_of(path: str) -> str:
    """Return `self` of `self.best`, and `state` of `state['step']`; empty for a variable."""
    return path.removesuffix(end_of(path)).removesuffix(".")


def whole_of(place: ast.expr) -> str:
    """Return the path of the object whose item or data *place* is: `self.history` of `self.history[0].data`."""
    while isinstance(place, ast.Attribute | ast.Subscript) and (
        not path_of(place) or (isinstance(place, ast.Attribute) and place.attr == "data")
    ):
        place = place.value
    return path_of(place)


def _name_of(function: ast.AST) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


@cache
def _beginnings_of(path: str) -> set[str]:
    """Return `self` and `self.best` of `self.best`."""
    return {path[: each.start()] for each in re.finditer(r"[.\[]|$", path)}


def _without(paths: AbstractSet[str], assigned: AbstractSet[str]) -> set[str]:
    """Return *paths* without those that are, or lie in, one of *assigned*."""
    return {each for each in paths if not _beginnings_of(each) & assigned}


def _walk(*nodes: ast.AST, but: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """Yield *nodes* and the nodes inside them, but no functions and no nodes of the kinds *but*."""
    return itertools.chain.from_iterable(_inside(each, but) for each in nodes)


# A node lives as long as the file's tree.
@cache
def _inside(node: ast.AST, but: tuple[type[ast.AST], ...]) -> tuple[ast.AST, ...]:
    if isinstance(node, (*FUNCTIONS, *but)):
        return ()
    return (node, *(inner for each in ast.iter_child_nodes(node) for inner in _inside(each, but)))


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(each, kind) for each in _walk(node))


def _written(block: Iterable[ast.AST]) -> set[str]:
    """Return the paths that *block* changes."""
    return set().union(*map(_written_by, block))


@cache
def _written_by(node: ast.AST) -> frozenset[str]:
    return frozenset(each.path for each in flows_in(node))


def read_in(*nodes: ast.AST, outside: Iterable[ast.AST] = ()) -> set[str]:
    """Return the variables, and paths of attributes, that *nodes* read; with [-1] if they read only the last item."""
    found: set[str] = set()
    own: set[str] = set()
    skipped = {id(each) for place in outside for each in ast.walk(place) if path_of(each)}
    for node in _walk(*nodes):
        if isinstance(node, ast.comprehension):
            own |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Subscript) and _is_last(node.slice) and path_of(node.value):
            found.add(f"{path_of(node.value)}[-1]")
            skipped |= {id(each) for each in ast.walk(node.value)}
        elif path_of(node) and isinstance(getattr(node, "ctx", None), ast.Load) and id(node) not in skipped:
            found.add(path_of(node))
            if isinstance(node, ast.Subscript):
                # Other items of the dict are not read.
                skipped |= {id(each) for each in ast.walk(node.value)}
    return {each for each in found if each.partition(".")[0] not in own}


def _is_last(place: ast.expr) -> bool:
    return isinstance(place, ast.UnaryOp) and ast.unparse(place) == "-1"


def _is_rate(target: ast.AST) -> bool:
    """Return True for `group["lr"]`, another option of an optimizer's group, or a gradient."""
    return end_of(path_of(target) or ast.unparse(target)) in _RATES


@cache
def _learns(node: ast.AST) -> bool:
    """Return True if a gradient is made or taken away in *node*, a rate is set, an optimizer or a schedule steps, a file is saved, or the loop ends."""
    return any(
        isinstance(each, ast.Break)
        or (isinstance(each, ast.Call) and (_name_of(each.func) in _STEPS or "save" in _name_of(each.func)))
        or (isinstance(getattr(each, "ctx", None), ast.Store) and _is_rate(each))
        for each in _walk(node)
    )
