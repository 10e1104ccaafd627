"""Plain variables that live longer than an epoch: no snapshot holds them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import Function, is_constant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.adopt.names import Chosen
    from elasticflow.adopt.reading.loops import Loops


def set_right(loops: Loops, chosen: Chosen, notes: list[str]) -> list[str]:
    """Return lines that set counters of steps to where the run goes on, and note what else begins anew after a restart."""
    begins = dotted_name(loops.ranged.args[0]) if len(loops.ranged.args) > 1 else ""
    lines = []
    for statement, name, places in _variables(loops):
        changes = [node for place in places for node in ast.walk(place) if _changes(node, name)]
        if not changes or name == begins:
            continue
        if is_constant(statement.value, 0) and len(changes) == 1 and _counts_batches(loops, changes[0]):
            lines.append(f"{name} = {chosen.run}.position.step")
        else:
            what = "begins anew after a restart: no snapshot holds a plain variable"
            notes.append(f"line {statement.lineno}: {name} {what}")
    return lines


def _variables(loops: Loops) -> Iterator[tuple[ast.Assign, str, list[ast.AST]]]:
    """Yield each plain variable that is set before the loop over epochs, with its name and where it may change later."""
    script = loops.script
    home = script.function_of(loops.epochs)
    for statement in _before(loops):
        if isinstance(statement, ast.Assign):
            name = dotted_name(statement.targets[0])
            if name and "." not in name and _is_plain(statement.value) and name not in _set_in_each(loops):
                yield statement, name, [loops.epochs]
    owner = None if home is None else script.class_of(home)
    made = None if owner is None else script.method(owner, "__init__")
    if owner is None or made is None:
        return
    methods: list[ast.AST] = [each for each in owner.body if isinstance(each, Function) and each is not made]
    for statement in made.body:
        if isinstance(statement, ast.Assign) and _is_plain(statement.value):
            name = dotted_name(statement.targets[0])
            if name.startswith("self.") and name not in _set_in_each(loops):
                yield statement, name, methods


def _before(loops: Loops) -> Iterator[ast.stmt]:
    """Yield the statements that stand before the loop over epochs, in its block and in those around it."""
    for whole, part in loops.script.above(loops.epochs):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(whole, name, None)
            if isinstance(block, list) and part in block:
                yield from block[: block.index(part)]


def _set_in_each(loops: Loops) -> set[str]:
    """Return the variables that every epoch sets to something that they were not made of."""
    return {
        dotted_name(target)
        for each in loops.epochs.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if dotted_name(target) not in {dotted_name(node) for node in ast.walk(each.value)}
    }


def _counts_batches(loops: Loops, node: ast.AST) -> bool:
    """Return whether a statement counts one more for every batch."""
    return (
        node in loops.batches.body
        and isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and is_constant(node.value, 1)
    )


def _is_plain(node: ast.expr) -> bool:
    """Return whether a value is a number, a text, None, or an empty list or dict."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if isinstance(node, ast.Call):
        return dotted_name(node.func) in {"float", "int", "list", "dict", "defaultdict"}
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.List | ast.Dict) and not ast.unparse(node)[1:-1]
    )


def _changes(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(dotted_name(each) == name for target in node.targets for each in ast.walk(target))
    if isinstance(node, ast.AugAssign):
        return dotted_name(node.target) == name
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_method or node.func.attr not in {"append", "update", "extend"}:  # type: ignore[attr-defined]
        return False
    return dotted_name(node.func.value) == name  # type: ignore[attr-defined]
