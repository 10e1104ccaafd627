"""The loop over epochs: it begins where the run goes on, and what follows an epoch's batches belongs to its last step."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt import counters, resuming
from elasticflow.adopt.names import pass_on
from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.steps import handed_out, loss_of, size_of
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import called_name, is_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.names import Chosen
    from elasticflow.adopt.reading.kept import Kept
    from elasticflow.adopt.reading.loader import Loader
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.forms import Kind

_BY_HAND = "write the loop on run.batches by hand: `elasticflow guide own-loop`"

_CHANGES = {"step", "update", "load_state_dict", "update_parameters"}


def in_epochs(
    loops: Loops,
    editor: Editor,
    chosen: Chosen,
    loader: Loader,
    kept: Sequence[Kept],
    kind: Kind,
    notes: list[str],
) -> None:
    """Have the loop over epochs keep what training changes, go on where the run does, and end each step.

    Raises:
        RefusalError: something around the loop over batches is not certain.
    """
    outside = loops.outside(loops.loader)
    if not outside:
        raise refuse(
            loops.batches,
            "which DataLoader is gone over is not certain where the epochs are counted",
            _BY_HAND,
        )
    epochs = _range(loops, editor, chosen, kept, notes)
    size = size_of(outside, kind, chosen)
    indent = editor.indent(loops.epochs.lineno)
    told = [
        f"{outside}.dataset",
        f"size={size}",
        f"epochs={epochs}",
        f'tail="{"drop" if loader.drops_last else "short"}"',
    ]
    told += [f"{ours}={outside}.{theirs}" for ours, theirs in loader.passes.items()]
    lines = [f"{chosen.run}.keep({', '.join(f'{each.name}={each.text}' for each in kept)})"]
    # One iterator for all epochs: a loop over it that is left at an epoch's end is not the end of it.
    lines += _call(f"{chosen.batches} = iter({chosen.run}.batches", told, len(indent), end="))")
    lines += counters.set_right(loops, chosen, notes)
    editor.insert_before(loops.epochs.lineno, [indent + line for line in lines])
    if loops.epoch_calls and not chosen.batches.startswith("self."):
        pass_on(loops, editor, chosen, loops.epoch_calls, chosen.batches, chosen.batches)
    _steps(loops, editor, chosen, kept, drops_last=loader.drops_last)
    notes.append(
        f"size: {size} is what the script has now; a number keeps the global batch where workers come and go"
    )


def _call(head: str, arguments: Sequence[str], indent: int, end: str, most: int = 100) -> list[str]:
    """Return a call in one line, or, where that is too long, with its arguments in one of their own."""
    line = f"{head}({', '.join(arguments)}{end}"
    if len(line) + indent <= most:
        return [line]
    inner = f"    {', '.join(arguments)}"
    if len(inner) + indent <= most:
        return [f"{head}(", inner, end]
    return [f"{head}(", *(f"    {each}," for each in arguments), end]


def _range(loops: Loops, editor: Editor, chosen: Chosen, kept: Sequence[Kept], notes: list[str]) -> str:
    """Have the epochs be counted on; return how many there are."""
    call = loops.ranged
    done = f"{chosen.run}.position.epoch"
    stop = call.args[-1]
    if len(call.args) == 1:
        resuming.take_away(loops, editor, kept, None, notes)
        editor.insert_at(editor.span(call.args[0])[0], f"{done}, ")
        return editor.source(stop)
    start = call.args[0]
    if is_constant(start, 0) or is_constant(start, 1):
        assert isinstance(start, ast.Constant)
        resuming.take_away(loops, editor, kept, None, notes)
        first = int(start.value)  # type: ignore[arg-type]
        editor.replace(start, done if not first else f"1 + {done}")
        if not first:
            return editor.source(stop)
        if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add) and is_constant(stop.right, 1):
            return editor.source(stop.left)
        return f"{editor.source(stop)} - 1"
    if not resuming.begins_at_zero(loops, start):
        raise refuse(
            loops.epochs,
            f"that {ast.unparse(start)}, where the epochs begin, is 0 without a checkpoint is not certain",
            _BY_HAND,
        )
    resuming.take_away(loops, editor, kept, start, notes)
    editor.replace(start, done)
    if not ast.unparse(start).startswith("self.") and isinstance(start, ast.Attribute):
        notes.append(
            f"line {start.lineno}: {ast.unparse(start)} counts no longer: the run knows where it goes on"
        )
    return editor.source(stop)


def _steps(loops: Loops, editor: Editor, chosen: Chosen, kept: Sequence[Kept], *, drops_last: bool) -> None:
    """Have each pass end by `run.step`, the epoch's last one behind what belongs to the epoch."""
    loop = loops.batches
    part = loops.part
    place = loops.epochs.body.index(part)
    head, tail = loops.epochs.body[:place], loops.epochs.body[place + 1 :]
    moved = {each.text for each in kept}
    if (early := _moving(loops, head, moved)) is not None:
        raise refuse(early, "state of training changes at the beginning of an epoch: going on in its middle would change it twice", "move it behind the epoch's batches")  # fmt: skip
    behind = [] if loops.is_one_function else _behind(loops)
    is_put_off = bool(tail) or _moving(loops, behind, moved) is not None
    loss = loss_of(loops, editor)
    inner, outer = editor.indent(loop.body[0].lineno), editor.indent(loop.lineno)
    step = f"{chosen.run}.step({f'loss={loss}' if loss else ''})"
    ends = f"{inner}if {chosen.batch}.end.is_epoch_end:"
    lines = [f"{inner}{step}", ends, f"{inner}    break"]
    if is_put_off:
        lines = [f"{ends}  # its step ends below", f"{inner}    break", f"{inner}{step}"]
    if loops.is_one_function:
        lines += [f"{outer}else:", f"{outer}    break  # asked to leave"]
    editor.insert_after(loop.body[-1].end_lineno or loop.body[-1].lineno, lines)
    own = editor.indent(loops.epochs.body[0].lineno)
    # Samples that are dropped may end the training an epoch early, where the global batch has grown.
    over = f" or {chosen.run}.is_finished" if drops_last else ""
    leaves = [f"{own}if {chosen.run}.should_leave{over}:", f"{own}    break"]
    if not loops.is_one_function:
        if is_put_off and loss:
            loss = handed_out(loops, editor, loops.epoch_calls, loss)
            step = f"{chosen.run}.step({f'loss={loss}' if loss else ''})"
        editor.insert_after(part.end_lineno or part.lineno, leaves)
    if is_put_off:
        end = loops.epochs.end_lineno or loops.epochs.lineno
        editor.insert_after(end, [f"{own}{step}", *([] if loops.is_one_function else leaves)])


def _behind(loops: Loops) -> list[ast.stmt]:
    """Return what follows the loop over batches in its function."""
    function = loops.script.function_of(loops.batches)
    return (
        []
        if function is None
        else [each for each in function.body if each.lineno > (loops.batches.end_lineno or 0)]
    )


def _moving(loops: Loops, block: Sequence[ast.stmt], moved: set[str]) -> ast.AST | None:
    """Return where, in some statements or in functions of the file that they call, kept state changes."""
    script = loops.script
    last = {each.rpartition(".")[2] for each in moved}
    waiting: list[ast.AST] = [*block]
    seen: set[ast.AST] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.AugAssign) and "lr" in ast.unparse(node.target):
                return node  # param_group["lr"] *= 0.1
            if not isinstance(node, ast.Call):
                continue
            if called_name(node) in _CHANGES and isinstance(node.func, ast.Attribute):
                owner = dotted_name(node.func.value)
                if owner in moved or owner.rpartition(".")[2] in last:
                    return node
            function = script.called(node)
            if function is not None and function not in seen:
                seen.add(function)
                waiting.append(function)
    return None
