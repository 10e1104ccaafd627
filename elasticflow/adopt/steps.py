"""The loop over batches on `run.batches`, and `run.step` at its end."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt.names import pass_on
from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.reading.values import returns_of
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import argument

if TYPE_CHECKING:
    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.names import Chosen
    from elasticflow.adopt.reading.loader import Loader
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.forms import Kind

_BY_HAND = "write the loop on run.batches by hand: `elasticflow guide own-loop`"


def in_batches(loops: Loops, editor: Editor, chosen: Chosen, loader: Loader, kind: Kind) -> None:
    """Have the loop over batches go over `run.batches`, and gradients be those of the global batch.

    Raises:
        RefusalError: something in it is not certain.
    """
    share = None if loader.drops_last or _sums(loops) else f"{chosen.batch}.share"
    variable = chosen.batch
    if loops.step_calls and share is not None:
        if _are_methods(loops):
            variable = f"self.{chosen.batch}"
            share = f"{variable}.share"
        else:
            pass_on(loops, editor, chosen, loops.step_calls, "share", share)
            share = "share"
    _target(loops, editor, variable, chosen.done, done_in_epoch(loops, chosen, kind))
    editor.replace(loops.loader, chosen.batches_inside)
    if share is not None:
        for call in loops.backwards:
            _shared(editor, call, share)
    chosen.batch = variable


def _sums(loops: Loops) -> bool:
    """Return whether a loss is a sum, not a mean: of it DistributedDataParallel makes no mean over samples either way."""
    functions = {loops.script.function_of(loops.backwards[0]), loops.script.function_of(loops.batches)}
    return any(
        isinstance(node, ast.keyword) and node.arg == "reduction" and isinstance(node.value, ast.Constant) and node.value.value == "sum"
        for function in functions
        for node in ast.walk(function or loops.batches)
    )  # fmt: skip


def _are_methods(loops: Loops) -> bool:
    return all(ast.unparse(call.func).startswith("self.") for call in loops.step_calls)


def _target(loops: Loops, editor: Editor, variable: str, name: str, done: str) -> None:
    """Have the loop's variable be the batch, and what it was be taken from that first."""
    loop = loops.batches
    target: ast.expr = loop.target
    _say_length(loops, editor)
    if loops.enumerated is not None:
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            raise refuse(loop, "the loop takes what enumerate yields in one variable", _BY_HAND)
        target = target.elts[1]
        _count(loops, editor, name, done)
    text = editor.source(target)
    if "\n" in text:
        raise refuse(loop, "the loop's variables stand in several lines", _BY_HAND)
    editor.replace(target, variable)
    first = loop.body[0]
    header = loop.iter.end_lineno or loop.lineno
    is_whole = editor.line(header).partition("#")[0].rstrip().endswith(":")
    line = header + 1 if is_whole else first.lineno
    plain = text[1:-1] if text.startswith("(") and text.endswith(")") and _is_flat(target) else text
    editor.insert_before(line, [f"{editor.indent(first.lineno)}{plain} = {variable}.data"])


def _say_length(loops: Loops, editor: Editor) -> None:
    """Tell a progress bar how many batches an epoch has, which an iterator over them does not."""
    bar = loops.script.parents.get(loops.loader)
    if (
        isinstance(bar, ast.Call)
        and loops.script.origin(bar.func).startswith("tqdm")
        and argument(bar, "total") is None
    ):
        editor.insert_at(editor.span(loops.loader)[1], f", total=len({editor.source(loops.loader)})")


def done_in_epoch(loops: Loops, chosen: Chosen, kind: Kind) -> str:
    """Return an expression for how many batches of the epoch are done, in the function of the loop over batches."""
    loader = dotted_name(loops.loader)
    size = size_of(loader, kind, chosen)
    size = f"({size})" if " " in size else size
    return f"{chosen.run}.position.offset % len({loader}.dataset) // {size}"


def size_of(loader: str, kind: Kind, chosen: Chosen) -> str:
    """Return an expression for the samples of all ranks in a batch that a DataLoader makes."""
    return (
        f"{loader}.total_batch_size"
        if kind == "accelerate"
        else f"{loader}.batch_size * {chosen.run}.world_size"
    )


def _is_flat(target: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts)


def _count(loops: Loops, editor: Editor, name: str, done: str) -> None:
    """Have `enumerate` count on from where in the epoch a restart goes on."""
    call = loops.enumerated
    assert call is not None
    index = loops.batches.target.elts[0]  # type: ignore[attr-defined]
    if isinstance(index, ast.Name) and not any(
        isinstance(node, ast.Name) and node.id == index.id and isinstance(node.ctx, ast.Load) for each in loops.batches.body for node in ast.walk(each)
    ):  # fmt: skip
        return
    start = argument(call, "start", 1)
    if start is None:
        editor.insert_at(editor.span(call)[1] - 1, f", {name}")
    else:
        editor.insert_at(editor.span(start)[1], f" + {name}")
    statement: ast.AST = call
    while not isinstance(statement, ast.stmt):
        statement = loops.script.parents[statement]
    editor.insert_before(statement.lineno, [f"{editor.indent(statement.lineno)}{name} = {done}"])


def _shared(editor: Editor, call: ast.Call, share: str) -> None:
    """Multiply the loss of a `backward` by what part of the global batch it is of."""
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    if call.args:  # accelerator.backward(loss), fabric.backward(loss)
        editor.insert_at(editor.span(call.args[0])[1], f" * {share}")
        if not isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call):
            raise refuse(call, "what backward() is given is no plain loss", _BY_HAND)
    elif (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Attribute)
        and owner.func.attr == "scale"
        and owner.args
    ):
        editor.insert_at(editor.span(owner.args[0])[1], f" * {share}")
    else:
        start, end = editor.span(owner)
        editor.insert_at(start, "(")
        editor.insert_at(end, f" * {share})")


def loss_of(loops: Loops, editor: Editor) -> str | None:
    """Return the loss as the loop over batches has it, behind its last statement; None if it has it under no name.

    A function that makes the gradients and returns nothing returns its loss from now on.
    """
    call = loops.backwards[0]
    assert isinstance(call.func, ast.Attribute)
    node = call.func.value
    if call.args:
        node = call.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
        node = node.args[0]
    text = dotted_name(node)
    if not text or text.startswith("self."):
        return text or None
    if not loops.step_calls:
        return text if not _is_deleted(loops, text) else None
    return handed_out(loops, editor, loops.step_calls, text)


def _is_deleted(loops: Loops, text: str) -> bool:
    first = text.partition(".")[0]
    return any(
        isinstance(node, ast.Delete) and any(dotted_name(each) == first for each in node.targets)
        for each in loops.batches.body
        for node in ast.walk(each)
    )


def handed_out(loops: Loops, editor: Editor, calls: tuple[ast.Call, ...], text: str) -> str | None:
    """Return a variable of the function that a call leads to as the caller has it; None if it does not get it.

    A function that returns nothing returns the variable from now on.
    """
    script = loops.script
    if len(calls) != 1 or "." in text:
        return None
    call = calls[0]
    function, statement = script.called(call), script.parents.get(call)
    if function is None:
        return None
    returned = returns_of(function)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and returned:
        is_it = all(
            dotted_name(each) == text or ast.unparse(each) in {f"{text}.item()", f"{text}.detach()"}
            for each in returned
        )
        return statement.targets[0].id if is_it else None
    is_bare = isinstance(statement, ast.Expr) and not any(
        isinstance(node, ast.Return) for node in ast.walk(function)
    )
    caller = script.function_of(call)
    is_free = all(node.id != text for node in ast.walk(caller or script.tree) if isinstance(node, ast.Name))
    if not is_bare or not is_free:
        return None
    last = function.body[-1]
    editor.insert_after(
        last.end_lineno or last.lineno, [f"{editor.indent(function.body[0].lineno)}return {text}"]
    )
    editor.insert_at(editor.span(call)[0], f"{text} = ")
    return text
