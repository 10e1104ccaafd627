"""The training loop of a script: where gradients are made, the loop over batches around it, the loop over epochs around that."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import Function, called_name
from elasticflow.lint.script.values import passed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.lint.script.script import Script

_MOST_HOPS = 5
_BY_HAND = "write the loop on run.batches by hand: `elasticflow guide own-loop`"


@dataclass(frozen=True)
class Loops:
    """A training loop.

    Attributes:
        script: The file.
        backwards: The calls that make gradients, all in one function.
        batches: The loop over batches.
        epochs: The loop over epochs.
        step_calls: Calls that lead from the loop over batches to the function that makes gradients; empty: it is the same one.
        epoch_calls: Calls that lead from the loop over epochs to that over batches.
        loader: What the loop over batches goes over, in its function.
        enumerated: The call of `enumerate` around it.
    """

    script: Script
    backwards: tuple[ast.Call, ...]
    batches: ast.For
    epochs: ast.For
    step_calls: tuple[ast.Call, ...]
    epoch_calls: tuple[ast.Call, ...]
    loader: ast.expr
    enumerated: ast.Call | None

    @property
    def is_one_function(self) -> bool:
        """Whether both loops stand in one function."""
        return not self.epoch_calls

    @property
    def part(self) -> ast.stmt:
        """The statement of the loop over epochs that is, or calls, the loop over batches."""
        inner: ast.AST = self.epoch_calls[0] if self.epoch_calls else self.batches
        return next(part for whole, part in self.script.above(inner) if whole is self.epochs)  # type: ignore[return-value]

    @property
    def ranged(self) -> ast.Call:
        """The call of `range` in the loop over epochs."""
        calls = [each for each in ast.walk(self.epochs.iter) if isinstance(each, ast.Call)]
        return next(each for each in calls if dotted_name(each.func) == "range")

    def outside(self, node: ast.expr) -> str | None:
        """Return an expression of the loop over batches as the function of the loop over epochs has it; None if it cannot."""
        return lifted(self.script, node, self.epoch_calls)

    def outside_step(self, node: ast.expr) -> str | None:
        """Return an expression of the function that makes gradients as the function of the loop over epochs has it."""
        return lifted(self.script, node, (*self.epoch_calls, *self.step_calls))


def loops_in(script: Script) -> Loops:
    """Return the training loop of a script.

    Raises:
        RefusalError: there is none that is certain, or it has a form that is not known.
    """
    backwards = [call for call in script.calls if called_name(call) == "backward" and _is_own(script, call)]
    if not backwards:
        raise refuse(
            None, "no call of backward() is in a loop of this file", "name the file that has the loop"
        )
    functions = {script.function_of(call) for call in backwards}
    if len(functions) > 1:
        raise refuse(backwards[1], "gradients are made in several functions", _BY_HAND)
    climbed = _Climb(script, backwards[0])
    if len(climbed.loops) < 2:
        what = (
            "is in no loop over epochs and batches of this file"
            if not climbed.loops
            else "has one loop around it, over no epochs"
        )
        raise refuse(backwards[0], f"backward() {what}", _BY_HAND)
    if len(climbed.loops) > 2:
        raise refuse(
            climbed.loops[2],
            "three loops go around backward(), not epochs and batches alone: folds, phases, several trainings",
            _BY_HAND,
        )
    batches, epochs = climbed.loops
    if any(script.function_of(call) is script.function_of(batches) and batches not in _wholes(script, call) for call in backwards):  # fmt: skip
        raise refuse(backwards[0], "gradients are made in several loops", _BY_HAND)
    if not isinstance(batches, ast.For) or not isinstance(epochs, ast.For):
        loop = batches if not isinstance(batches, ast.For) else epochs
        raise refuse(loop, "a `while` or `async for` loop trains", _BY_HAND)
    loader, enumerated = _loader_of(script, batches)
    found = Loops(script, tuple(backwards), batches, epochs, climbed.calls[0], climbed.calls[1], loader, enumerated)  # fmt: skip
    _check_batches(found)
    _check_epochs(found)
    return found


def _is_own(script: Script, call: ast.Call) -> bool:
    """Return whether a call of `backward` is none of a torch.autograd.Function's method, nor of a closure for an optimizer."""
    function = script.function_of(call)
    return function is None or function.name != "backward"


def _wholes(script: Script, node: ast.AST) -> list[ast.AST]:
    return [whole for whole, _ in script.above(node)]


class _Climb:
    """The way from a call up: the loops around it, and the calls that lead there, by the loop that they stand in."""

    def __init__(self, script: Script, node: ast.AST) -> None:
        self.loops: list[ast.stmt] = []
        self.calls: list[tuple[ast.Call, ...]] = []
        calls: list[ast.Call] = []
        for _ in range(_MOST_HOPS):
            for whole, part in script.above(node):
                if isinstance(whole, ast.For | ast.While | ast.AsyncFor) and part in whole.body:
                    self.loops.append(whole)
                    self.calls.append(tuple(reversed(calls)))
                    calls = []
            function = script.function_of(node)
            if function is None or not (callers := script.callers.get(function, [])):
                return
            _check_decorators(function)
            if len(callers) > 1:
                if len(self.loops) < 2:
                    what = f"{function.name} is called in several places, of which not all train"
                    raise refuse(callers[1], what, _BY_HAND)
                return
            node = callers[0]
            calls.append(callers[0])


def _check_decorators(function: Function) -> None:
    for each in function.decorator_list:
        name = dotted_name(each.func if isinstance(each, ast.Call) else each).rpartition(".")[2]
        if name not in {"record", "main", "command", "option", "argument", "staticmethod", "rank_zero_only"}:
            what = f"{function.name} is called by its decorator {name}, as often as that likes"
            raise refuse(function, what, _BY_HAND)


def _loader_of(script: Script, loop: ast.For) -> tuple[ast.expr, ast.Call | None]:
    node, enumerated = loop.iter, None
    for _ in range(4):
        if isinstance(node, ast.Name):
            # bar = tqdm(loader); for batch in bar:
            values = [
                each
                for each in script.names.assigned(node.id)
                if isinstance(each, ast.Call) and _wraps(script, each)
            ]
            function = script.function_of(loop)
            if len(values) == 1 and script.function_of(values[0]) is function:
                node = values[0]
                continue
        if not isinstance(node, ast.Call) or not node.args:
            break
        name = script.origin(node.func)
        if name == "builtins.enumerate":
            enumerated = node
        elif not _wraps(script, node):
            break
        node = node.args[0]
    if isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and dotted_name(node).startswith("self.")
    ):
        return node, enumerated
    what = "counts, and reads its data itself" if isinstance(node, ast.Call) and dotted_name(node.func) == "range" else "goes over no DataLoader that is a variable"  # fmt: skip
    raise refuse(
        loop,
        f"the loop around backward() {what}",
        "data that the script reads itself: `elasticflow guide own-loop`, run.step(samples=...)",
    )


def _wraps(script: Script, call: ast.Call) -> bool:
    """Return whether a call goes over what it is given and yields the same: tqdm, enumerate."""
    origin = script.origin(call.func)
    return origin.split(".")[0] == "tqdm" or origin == "builtins.enumerate"


def _check_batches(found: Loops) -> None:
    loop = found.batches
    for node in own_statements(loop.body):
        if isinstance(node, ast.Return | ast.Continue | ast.Break):
            word = type(node).__name__.lower()
            raise refuse(
                node, f"`{word}` in the loop over batches: what it skips would be a step that never ends",
                "let every batch come to its end; to end training early: run.stop(reason)",
            )  # fmt: skip
    if loop.orelse or loop.body[0].lineno == loop.lineno:
        raise refuse(loop, "the loop over batches has an `else`, or stands in one line", _BY_HAND)
    _check_steps(found)


def own_statements(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block at any depth; of loops inside only what leaves the block, not their own `break`."""
    for statement in block:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner = [*_blocks(statement)]
        for part in inner:
            for each in own_statements(part):
                is_loop = isinstance(statement, ast.For | ast.While | ast.AsyncFor)
                if not (is_loop and isinstance(each, ast.Break | ast.Continue)):
                    yield each


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield handler.body


def _check_steps(found: Loops) -> None:
    """Refuse gradients that are accumulated over several batches."""
    script = found.script
    for call in script.calls:
        if called_name(call) in {"accumulate", "no_sync", "no_backward_sync"}:
            raise refuse(
                call,
                "gradients are added up over several batches: between these, no snapshot would hold them",
                _PARTS,
            )
    for call in steps_of(found):
        for whole, part in script.above(call):
            if whole is found.batches:
                break
            if isinstance(whole, ast.If) and part is not whole.test and not _is_of_precision(whole):
                raise refuse(
                    whole, "the optimizer moves under a condition: after some batches gradients are only added up, and no snapshot would hold them",
                    _PARTS,
                )  # fmt: skip


_PARTS = "a larger batch, cut into parts: for part in batch.parts(16): ... (`elasticflow guide own-loop`)"


def _is_of_precision(statement: ast.If) -> bool:
    """Return whether a condition chooses between a gradient scaler's step and the plain one."""
    return bool(statement.orelse) and all(any(called_name(call) == "step" for each in part for call in ast.walk(each) if isinstance(call, ast.Call)) for part in (statement.body, statement.orelse))  # fmt: skip


def steps_of(found: Loops) -> list[ast.Call]:
    """Return the calls of `step` in the loop over batches, of optimizers, schedules and scalers."""
    places: list[ast.AST] = [found.batches]
    script = found.script
    places += [function for call in found.step_calls if (function := script.called(call)) is not None]
    return [
        call
        for call in script.calls
        if called_name(call) == "step"
        and isinstance(call.func, ast.Attribute)
        and script.called(call) is None
        and any(place in _wholes(script, call) or script.function_of(call) is place for place in places)
    ]


def _check_epochs(found: Loops) -> None:
    loop, script = found.epochs, found.script
    if loop.orelse or not any(isinstance(each, ast.Call) and dotted_name(each.func) == "range" for each in ast.walk(loop.iter)):  # fmt: skip
        raise refuse(loop, "the loop around the batches is no `for epoch in range(...)`", _BY_HAND)
    if not isinstance(loop.target, ast.Name) or found.ranged.keywords or not 1 <= len(found.ranged.args) <= 2:
        raise refuse(loop, "the loop over epochs counts in steps, or into no plain variable", _BY_HAND)
    for node in own_statements(loop.body):
        inside = node in ast.walk(found.batches)
        if isinstance(node, ast.Break | ast.Return | ast.Continue) and not inside:
            word = type(node).__name__.lower()
            raise refuse(node, f"`{word}` in the loop over epochs: training ends early, or an epoch does", "run.stop(reason) before run.step() ends training on all ranks")  # fmt: skip
    for whole, _ in script.above(found.epoch_calls[0] if found.epoch_calls else found.batches):
        if whole is loop:
            break
        if not isinstance(whole, ast.With | ast.Expr | ast.Assign | ast.Call | ast.Tuple):
            raise refuse(
                whole, "the loop over batches stands under a condition of the loop over epochs", _BY_HAND
            )


def lifted(script: Script, node: ast.expr, calls: Sequence[ast.Call]) -> str | None:
    """Return an expression of the function that the last of *calls* calls, as the function of the first call has it.

    A parameter is what is passed for it; an attribute of `self` one of the object whose method is called.
    """
    text = dotted_name(node)
    for call in reversed(calls):
        first, _, rest = text.partition(".")
        function = script.called(call)
        if function is None:
            return None
        names = [
            each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        ]
        if first == "self" and names[:1] == ["self"]:
            owner = dotted_name(call.func).rpartition(".")[0]
        elif first in names:
            value = passed(script, call, function, first)
            owner = "" if value is None else dotted_name(value)
        elif not _is_local(script, function, first):
            owner = first
        else:
            values = [
                each
                for each in script.names.assigned(first)
                if each is not None and script.function_of(each) is function
            ]
            same = dotted_name(values[0]) if len(values) == 1 else ""
            return None if not same else lifted(script, values[0], calls[: calls.index(call) + 1])
        if not owner:
            return None
        text = f"{owner}.{rest}" if rest else owner
    return text or None


def _is_local(script: Script, function: Function, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) and script.function_of(node) is function
        for node in ast.walk(function)
    )  # fmt: skip
