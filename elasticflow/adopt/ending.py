"""`run.finish` in the place of what takes the process group down."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.lint.script.script import Function, called_name

if TYPE_CHECKING:
    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.names import Chosen
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.forms import Form
    from elasticflow.lint.script.script import Script

_BY_HAND = "run.finish() is the script's last line, in the place of destroy_process_group()"


def finish(loops: Loops, form: Form, editor: Editor, chosen: Chosen) -> ast.stmt:
    """Have the script end by `run.finish`; return the statement whose place that is, or behind it.

    Raises:
        RefusalError: where it ends is not certain.
    """
    script = loops.script
    home = script.function_of(loops.epochs)
    block = _block(script, loops.epochs)
    behind = block[block.index(loops.epochs) + 1 :]
    ends = [call for call in script.calls if _takes_down(script, call, form)]
    if len(ends) > 1:
        raise refuse(ends[1], "the process group is taken down in several places", _BY_HAND)
    indent = editor.indent(loops.epochs.lineno)
    line = f"{chosen.run}.finish()"
    statement = script.parents[ends[0]] if ends else None
    if statement is not None:
        if not isinstance(statement, ast.Expr) or not _is_last(script, statement):
            raise refuse(statement, "something follows the end of the process group", _BY_HAND)
        if called_name(ends[0]) == "end_training" and any(
            called_name(call) == "init_trackers" for call in script.calls
        ):
            raise refuse(statement, "trackers end in end_training(), which takes the process group down, too", "end them before run.finish(): for tracker in accelerator.trackers: tracker.finish()")  # fmt: skip
        editor.replace_lines(
            statement.lineno,
            statement.end_lineno or statement.lineno,
            [editor.indent(statement.lineno) + line],
        )
    else:
        last = _end(script, block[-1])
        if last is None or isinstance(last, ast.Return):
            raise refuse(last or loops.epochs, "where the script ends is not certain", _BY_HAND)
        editor.insert_after(last.end_lineno or last.lineno, [f"{editor.indent(last.lineno)}{line}"])
        statement = last
    others = [each for each in behind if each is not statement or not ends]
    if others or (home is not None and not _calls_are_last(script, home, statement if ends else None)):
        text = [f"{indent}if not {chosen.run}.is_finished:", f"{indent}    {line}  # asked to leave"]
        editor.insert_after(loops.epochs.end_lineno or loops.epochs.lineno, text)
    return statement


def _end(script: Script, statement: ast.stmt) -> ast.stmt | None:
    """Return the last statement that is run, of the function of a statement or of those that call it; None: not certain."""
    for _ in range(8):
        if _is_last(script, statement):
            return statement
        function = script.function_of(statement)
        callers = [] if function is None else script.callers.get(function, [])
        if len(callers) != 1:
            return None
        above: ast.AST = callers[0]
        while not isinstance(above, ast.stmt):
            above = script.parents[above]
        statement = _block(script, above)[-1]
    return None


def _takes_down(script: Script, call: ast.Call, form: Form) -> bool:
    if script.origin(call.func) == "torch.distributed.destroy_process_group":
        return True
    return form.kind == "accelerate" and called_name(call) == "end_training"


def _block(script: Script, statement: ast.stmt) -> list[ast.stmt]:
    whole = script.parents[statement]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(whole, name, None)
        if isinstance(block, list) and statement in block:
            return block
    raise refuse(statement, "the loop over epochs stands where nothing is known to follow", _BY_HAND)


def _is_last(script: Script, statement: ast.stmt) -> bool:
    """Return whether nothing is run behind a statement, nor behind the calls of its function."""
    for _ in range(16):
        block = _block(script, statement)
        if statement is not block[-1]:
            return False
        whole = script.parents[statement]
        if isinstance(whole, ast.Module):
            return True
        if isinstance(whole, Function):
            callers = script.callers.get(whole, [])
            if len(callers) != 1:
                return False
            above: ast.AST = callers[0]
            while not isinstance(above, ast.stmt):
                above = script.parents[above]
            statement = above
        elif isinstance(whole, ast.If | ast.With):
            statement = whole
        else:
            return False
    return False


def _calls_are_last(script: Script, home: Function, end: ast.AST | None) -> bool:
    """Return whether behind the calls of a function nothing comes but the end of the process group."""
    callers = script.callers.get(home, [])
    if not callers:
        return False
    for call in callers:
        statement: ast.AST = call
        while not isinstance(statement, ast.stmt):
            statement = script.parents[statement]
        behind = _block(script, statement)
        if [each for each in behind[behind.index(statement) + 1 :] if each is not end]:
            return False
    return True
