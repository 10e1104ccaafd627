"""Calls that every rank must make, also inside functions of the file, and the ranks that do make them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.python_source.syntax import argument, called_name, is_constant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.lint.script.ranks import Ranks, Side
    from elasticflow.python_source.script import Function, Script

# Each with the position of its argument `group`, which may name only some of the ranks.
_IN_TORCH = {
    "barrier": 0, "monitored_barrier": 0, "all_reduce": 2, "all_gather": 2, "all_gather_into_tensor": 2, "all_gather_single": 2,
    "all_gather_object": 2, "all_to_all": 2, "all_to_all_single": 4, "broadcast": 2, "broadcast_object_list": 2,
    "gather": 3, "gather_object": 3, "reduce": 3, "reduce_scatter": 3, "reduce_scatter_tensor": 3, "reduce_scatter_single": 3,
    "scatter": 3, "scatter_object_list": 3, "init_process_group": 99, "new_group": 99,
}  # fmt: skip
_COLLECTIVES = {f"torch.distributed.{name}": position for name, position in _IN_TORCH.items()}
_ACCELERATE = "wait_for_everyone"
# Calls of other files in which no rank waits.
_HARMLESS = ("builtins.", "os.", "sys.", "time.", "json.", "logging.", "shutil.", "pathlib.", "datetime.", "torch.save", "torch.load", "torch.device", "torch.manual_seed", "torch.tensor", "torch.zeros", "torch.ones", "torch.empty", "torch.cuda.", "warnings.", "wandb.", "random.", "numpy.", "copy.", "math.", "tqdm", "gc.", "io.", "re.", "subprocess.", "contextlib.")  # fmt: skip
_LEAVES = {"sys.exit", "os._exit", "builtins.exit", "builtins.quit"}
_MOST_HOPS = 8

Leaving = Literal["block", "function"]


class Reached(NamedTuple):
    """A call by which a rank enters a collective.

    Attributes:
        collective: Name of the collective as written where it is called.
    """

    call: ast.Call
    collective: str
    line: int
    is_direct: bool


class Split(NamedTuple):
    """A collective that only some ranks reach.

    Attributes:
        side: The ranks that reach it.
        cause: The condition that separates the ranks, or the statement by which the others leave before.
    """

    reached: Reached
    side: Side
    cause: ast.stmt
    is_after_exit: bool


class Collectives:
    """The collectives of one file."""

    def __init__(self, script: Script, ranks: Ranks) -> None:
        self._script, self._ranks = script, ranks
        self._sure: dict[Function, Reached | None] = {}
        self._may: dict[Function, bool] = {}

    def is_collective(self, call: ast.Call) -> bool:
        """Return whether every rank must make a call, by what the file imports."""
        position = _COLLECTIVES.get(self._script.origin(call.func))
        if position is None:
            return called_name(call) == _ACCELERATE and "accelerate" in self._script.names.modules
        group = argument(call, "group", position)
        return group is None or is_constant(group, None) or self._script.origin(group).endswith(".WORLD")

    def reached_by(self, call: ast.Call, hops: int = _MOST_HOPS) -> Reached | None:
        """Return the collective that a call certainly enters; None if there is none."""
        if self.is_collective(call):
            return Reached(call, ast.unparse(call.func), call.lineno, is_direct=True)
        function = self._script.called(call) if hops else None
        if function is None or isinstance(function, ast.AsyncFunctionDef) or _is_generator(function):
            return None
        if function not in self._sure:
            self._sure[function] = None  # a function that calls itself
            self._sure[function] = self._surely(function.body, hops - 1)[0]
        inner = self._sure[function]
        return None if inner is None else Reached(call, inner.collective, inner.line, is_direct=False)

    def first_of(self, nodes: Sequence[ast.AST]) -> Reached | None:
        """Return the first collective in some nodes, also under conditions; None if there is none."""
        return next(filter(None, (self.reached_by(call) for call in _calls(nodes))), None)

    def may_take_part(self, nodes: Sequence[ast.AST]) -> bool:
        """Return whether the nodes may call a collective, also in a function of another file."""
        return any(self._may_be(call) for call in _calls(nodes))

    def has_own(self, nodes: Sequence[ast.AST]) -> bool:
        """Return whether the nodes call a collective, directly or in functions of this file."""
        return any(self.is_collective(call) or self._in_function(call) for call in _calls(nodes))

    def _in_function(self, call: ast.Call) -> bool:
        function = self._script.called(call)
        if function is None:
            return False
        if function not in self._may:
            self._may[function] = False
            self._may[function] = self.has_own(function.body)
        return self._may[function]

    def _may_be(self, call: ast.Call) -> bool:
        if self.is_collective(call) or self._in_function(call):
            return True
        if self._script.called(call) is not None:
            return False
        origin = self._script.origin(call.func)
        if origin:
            return not origin.startswith(_HARMLESS)
        if isinstance(call.func, ast.Name):
            return True
        # A method of an object: only if its name says so.
        name = called_name(call).lower()
        return any(word in name for word in ("barrier", "broadcast", "gather", "reduce", "scatter", "sync", "wait", "recv", "send", "serve", "worker"))  # fmt: skip

    def _surely(self, block: Sequence[ast.stmt], hops: int) -> tuple[Reached | None, bool]:
        """Return the first collective that every rank in a block enters, and whether a rank may leave before."""
        for statement in block:
            for part in _inner_blocks(statement):
                found, may_leave = (
                    self._surely(part, hops) if self._is_run(statement, part) else (None, False)
                )
                if found is not None:
                    return found, False
                if may_leave or (not self._is_run(statement, part) and self._leaves_several(statement, part)):
                    return None, True
            for call in _calls(_own_expressions(statement)):
                found_here = self.reached_by(call, hops)
                if found_here is not None:
                    return found_here, False
            if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue):
                return None, True
        return None, False

    def _is_run(self, statement: ast.stmt, part: Sequence[ast.stmt]) -> bool:
        """Return whether a part of a compound statement runs with several processes."""
        if isinstance(statement, ast.If):
            if self._ranks.is_distributed(statement.test):
                return part is statement.body
            return self._ranks.is_alone(statement.test) and part is statement.orelse
        return isinstance(statement, ast.For | ast.With | ast.Try) and part is statement.body

    def _leaves_several(self, statement: ast.stmt, part: Sequence[ast.stmt]) -> bool:
        """Return whether a conditional part may leave the function with several processes."""
        if isinstance(statement, ast.If):
            is_alone = (self._ranks.is_alone(statement.test) and part is statement.body) or (
                self._ranks.is_distributed(statement.test) and part is statement.orelse
            )
            if is_alone:
                return False
        return any(isinstance(node, ast.Return | ast.Raise) for each in part for node in ast.walk(each))

    def splits(self, function: Function | ast.Module) -> list[Split]:
        """Return the collectives in a function that only some ranks reach, without those in inner functions."""
        found: list[Split] = []
        self._walk(function.body, None, found)
        return found

    def _walk(self, block: Sequence[ast.stmt], now: _Now | None, found: list[Split]) -> tuple[_Now | None, Leaving | None]:  # fmt: skip
        """Record collectives that only some ranks reach; return the ranks that continue after the block, and the cause."""
        scope: Leaving | None = None
        for statement in block:
            if isinstance(statement, ast.If):
                changed = self._branches(statement, now, found)
                if changed is not None and now is None:
                    now, scope = changed
                continue
            if now is not None:
                self._note(_own_expressions(statement), now, found)
            for part in _inner_blocks(statement):
                after, left = self._walk(part, now, found)
                is_kept = left == "function" or not isinstance(statement, ast.For | ast.While | ast.AsyncFor)
                if now is None and after is not None and left is not None and is_kept:
                    now, scope = after, left
        return now, scope

    def _branches(self, statement: ast.If, now: _Now | None, found: list[Split]) -> tuple[_Now, Leaving] | None:  # fmt: skip
        if self._ranks.is_alone(statement.test):
            self._walk(statement.orelse, now, found)
            return None
        sides = self._ranks.sides(statement.test)
        changed: tuple[_Now, Leaving] | None = None
        for part, other, side, rest in (
            (statement.body, statement.orelse, sides.if_true, sides.if_false),
            (statement.orelse, statement.body, sides.if_false, sides.if_true),
        ):
            inner = now
            if now is None and side is not None and not self.may_take_part(other):
                inner = _Now(side, statement, is_after_exit=False)
            after, left = self._walk(part, inner, found)
            if now is None and inner is None and after is not None and left is not None:
                changed = after, left
            leaving = self._leaving(part)
            if now is None and rest is not None and leaving is not None and not self._is_hidden(part):
                changed = _Now(rest, statement, is_after_exit=True), leaving
        return changed

    def _is_hidden(self, part: Sequence[ast.stmt]) -> bool:
        """Return whether the leaving ranks may have entered a collective that the text does not show."""
        return self.may_take_part(part) and not any(self.is_collective(call) for call in _calls(part))

    def _leaving(self, part: Sequence[ast.stmt]) -> Leaving | None:
        last = part[-1] if part else None
        if isinstance(last, ast.Return):
            return "function"
        if isinstance(last, ast.Continue | ast.Break):
            return "block"
        is_call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
        if is_call and self._script.origin(last.value.func) in _LEAVES:  # type: ignore[union-attr]
            return "function"
        return None

    def _note(self, nodes: Sequence[ast.AST], now: _Now, found: list[Split]) -> None:
        for call in _calls(nodes):
            reached = self.reached_by(call)
            if reached is not None:
                found.append(Split(reached, now.side, now.cause, now.is_after_exit))


class _Now(NamedTuple):
    """The ranks that run the current statements, if not all do."""

    side: Side
    cause: ast.stmt
    is_after_exit: bool


def _inner_blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement, in order; no block of a function or class."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield handler.body


def _own_expressions(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement outside of its blocks."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    return [
        each
        for each in ast.iter_child_nodes(statement)
        if not isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case)
    ]


def _calls(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls in some nodes in order, without calls in functions and classes defined there."""
    waiting = [*reversed(nodes)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting += [*ast.iter_child_nodes(node)][::-1]


def _is_generator(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
