"""The script's own way back from a checkpoint, which the run's snapshots take the place of."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeGuard

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import Function, argument, called_name, is_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.reading.kept import Kept
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.script import Script

_BY_HAND = "take the loading of the script's own checkpoint away: run.keep brings everything back, and run.position.epoch says where"

_OTHER_WORK = {"backward", "step", "DataLoader", "barrier", "apply"}


def begins_at_zero(loops: Loops, start: ast.expr) -> bool:
    """Return whether the variable that the epochs begin at is 0 where no checkpoint is loaded."""
    script = loops.script
    text = dotted_name(start)
    if not text:
        return False
    owner = text.rpartition(".")[0]
    if owner and owner != "self":
        name = text.rpartition(".")[2]
        return any(_is_option(call, name) for call in script.calls)
    values = (
        script.names.assigned_attribute(text.rpartition(".")[2]) if owner else script.names.assigned(text)
    )
    return any(value is not None and is_constant(value, 0) for value in values)


def _is_option(call: ast.Call, name: str) -> bool:
    if called_name(call) != "add_argument":
        return False
    options = [
        each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return any(each.lstrip("-").replace("-", "_") == name for each in options) and is_constant(argument(call, "default"), 0)  # fmt: skip


def take_away(
    loops: Loops, editor: Editor, kept: Sequence[Kept], start: ast.expr | None, notes: list[str]
) -> None:
    """Take away what loads a checkpoint to go on from; a model's first weights stay.

    Raises:
        RefusalError: what it loads is used elsewhere, or where it begins and ends is not certain.
    """
    script = loops.script
    loads = [call for call in script.calls if called_name(call) == "load_state_dict"]
    loads = [call for call in loads if _goes_on(script, call, kept, start)]
    if not loads and any(called_name(call) in {"load_state", "load_checkpoint"} for call in script.calls):
        call = next(call for call in script.calls if called_name(call) in {"load_state", "load_checkpoint"})
        raise refuse(
            call, "the script goes on from a checkpoint by a call that the file does not show", _BY_HAND
        )
    statements = {_whole(loops, call) for call in loads}
    for statement in statements:
        _check(script, statement, start)
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        whole = script.parents[statement]
        is_alone = getattr(whole, "body", [])[:2] == [statement]
        editor.replace_lines(first, last, [f"{editor.indent(first)}pass"] if is_alone else [])
    if any(script.calls_of("torch.save")):
        line = next(script.calls_of("torch.save")).lineno
        notes.append(f"line {line}: torch.save stays as it is: a file for others; nothing goes on from it")


def _goes_on(script: Script, call: ast.Call, kept: Sequence[Kept], start: ast.expr | None) -> bool:
    """Return whether a load is a part of going on: an optimizer's, or in one place with an optimizer or the epoch."""
    assert isinstance(call.func, ast.Attribute) or True
    function = script.function_of(call)
    place: ast.AST = function or script.tree
    block = next((whole for whole, _ in script.above(call) if isinstance(whole, ast.If | ast.Try)), None)
    if function is None or block is not None:
        place = block or call
    names = {each.name for each in kept if each.name != "model"} | {
        each.text.rpartition(".")[2] for each in kept if each.name != "model"
    }
    for node in ast.walk(place):
        if (
            isinstance(node, ast.Call)
            and called_name(node) == "load_state_dict"
            and isinstance(node.func, ast.Attribute)
            and dotted_name(node.func.value).rpartition(".")[2] in names
        ):
            return True
        if (
            start is not None
            and isinstance(node, ast.Assign)
            and any(dotted_name(target) == dotted_name(start) for target in node.targets)
        ):
            return True
    return False


def _whole(loops: Loops, call: ast.Call) -> ast.stmt:
    """Return the statement that loads a checkpoint if there is one: the condition around it, or around the call of its function."""
    script = loops.script
    node: ast.AST = call
    for _ in range(4):
        found = _condition(script, node)
        if found is not None:
            return found
        function = script.function_of(node)
        callers = [] if function is None else script.callers.get(function, [])
        if function is None or len(callers) != 1 or function is script.function_of(loops.epochs):
            break
        statement = script.parents.get(callers[0])
        if isinstance(statement, ast.Expr) and _condition(script, callers[0]) is None:
            return statement
        node = callers[0]
    raise refuse(
        call, "which statements load the script's own checkpoint, and nothing else, is not certain", _BY_HAND
    )


def _condition(script: Script, node: ast.AST) -> ast.stmt | None:
    found: ast.stmt | None = None
    for whole, _ in script.above(node):
        if isinstance(whole, ast.If | ast.Try) and not (
            isinstance(whole, ast.If) and "__name__" in ast.unparse(whole.test)
        ):
            found = whole
    return found


def _check(script: Script, statement: ast.stmt, start: ast.expr | None) -> None:
    """Check that nothing is used later that a statement alone assigns, and that it does nothing else than load.

    Raises:
        RefusalError: it may do more.
    """
    inside = {*ast.walk(statement)}
    scope: ast.AST = script.function_of(statement) or script.tree
    begins = "" if start is None else dotted_name(start)
    names = {dotted_name(node) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)}
    for name in sorted(names - {""}):
        used = [
            node for node in ast.walk(scope) if node not in inside and node is not start and _is(node, name)
        ]
        loads = [
            node
            for node in used
            if isinstance(node.ctx, ast.Load) and (node.lineno > statement.lineno or name == begins)
        ]
        stores = [node for node in used if isinstance(node.ctx, ast.Store) and node.lineno < statement.lineno]
        if loads and not stores:
            raise refuse(
                statement, f"{name}, which the loading of the checkpoint sets, is used elsewhere", _BY_HAND
            )
    others = any(isinstance(node, ast.Call) and called_name(node) in _OTHER_WORK for node in inside)
    without = statement.orelse if isinstance(statement, ast.If) else []
    if others or any(isinstance(node, Function) for node in inside) or not all(map(_is_idle, without)):
        what = "the condition around the loading of the checkpoint does other things, too"
        raise refuse(statement, what, _BY_HAND)


def _is(node: ast.AST, name: str) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute) and dotted_name(node) == name


def _is_idle(statement: ast.stmt) -> bool:
    """Return whether a statement sets a constant, or says something."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return called_name(statement.value) in {"print", "info", "warning", "debug", "log"}
    return isinstance(statement, ast.Pass | ast.Expr)
