"""The import, and `elasticflow.join` in the place of what forms the process group."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.lint.script.forms import INIT
from elasticflow.lint.script.script import Function

if TYPE_CHECKING:
    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.names import Chosen
    from elasticflow.lint.script.forms import Form
    from elasticflow.lint.script.script import Script

_BY_HAND = "put `run = elasticflow.join()` where the process group is formed, whatever the number of workers: `elasticflow guide own-loop`"


def join(script: Script, form: Form, editor: Editor, chosen: Chosen, homes: set[Function | None]) -> None:
    """Have the script join a run where it has formed its process group; *homes* are the functions that know the run.

    Raises:
        RefusalError: where that is, is not certain.
    """
    _import(script, editor)
    statement = _place(script, form)
    function = script.function_of(statement)
    lines = [f"{chosen.run} = elasticflow.join()"]
    if function is not None and homes != {function}:
        lines.insert(0, f"global {chosen.run}")
    indent = editor.indent(statement.lineno)
    lines = [indent + line for line in lines]
    if form.kind == "ddp":
        editor.replace_lines(statement.lineno, statement.end_lineno or statement.lineno, lines)
    else:
        editor.insert_before(statement.lineno, lines)


def _import(script: Script, editor: Editor) -> None:
    if "elasticflow" in script.names.modules:
        return
    imports = [
        each
        for each in script.tree.body
        if isinstance(each, ast.Import | ast.ImportFrom) and getattr(each, "module", "") != "__future__"
    ]
    after = next((each for each in imports if ast.unparse(each).startswith(("import torch", "from torch", "from accelerate", "from lightning"))), None)  # fmt: skip
    if after is None:
        raise refuse(None, "torch is not imported at the beginning of the file", _BY_HAND)
    editor.insert_before(after.lineno, ["import elasticflow"])


def _place(script: Script, form: Form) -> ast.stmt:
    if form.kind != "ddp":
        assert form.node is not None
        calls = [call for call in script.calls if script.origin(call.func) == script.origin(form.node.func)]  # type: ignore[attr-defined]
        what = ast.unparse(form.node.func)  # type: ignore[attr-defined]
    else:
        calls, what = list(script.calls_of(INIT)), "init_process_group"
    if len(calls) != 1:
        node = calls[1] if calls else form.node
        raise refuse(
            node,
            f"{what} is called in {len(calls) or 'no'} place{'' if len(calls) == 1 else 's'} of this file",
            _BY_HAND,
        )
    statement: ast.AST = calls[0]
    while not isinstance(statement, ast.stmt):
        statement = script.parents[statement]
    whole = script.parents[statement]
    is_guard = isinstance(whole, ast.If) and "__name__" in ast.unparse(whole.test)
    if not isinstance(whole, Function | ast.Module) and not is_guard:
        raise refuse(statement, f"{what} stands under a condition", _BY_HAND)
    is_plain = isinstance(statement, ast.Expr) and statement.value is calls[0]
    if form.kind == "ddp" and not is_plain:
        raise refuse(statement, f"what {what} returns is used", _BY_HAND)
    if statement.lineno == getattr(whole, "lineno", 0) or ";" in _last_line(script, statement):
        raise refuse(statement, "several statements stand in one line", _BY_HAND)
    return statement


def _last_line(script: Script, statement: ast.stmt) -> str:
    """Return the last line of a statement without its comment's text."""
    return script.lines[(statement.end_lineno or statement.lineno) - 1].partition("#")[0]
