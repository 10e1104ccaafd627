"""Which rung a script is on, and which of its own lines the next one changes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.adopt.reading.loops import loops_in
from elasticflow.adopt.reading.refusal import RefusalError
from elasticflow.lint.script.forms import ACCELERATORS, FABRICS, INIT, JOIN
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.script.forms import Form
    from elasticflow.lint.script.script import Script

RUNGS = (
    "torchrun's contract: the script runs as it is; a restart starts it again, at its beginning unless it loads a checkpoint itself",
    "elasticflow.join: snapshots, every sample once, on in the middle of an epoch",
    "run.gradients: the same bits at any number of workers",
)


class Change(NamedTuple):
    """A line of the script, and what it becomes.

    Attributes:
        line: Its number.
        before: What stands there.
        after: What is to stand there.
    """

    line: int
    before: str
    after: str


def next_changes(script: Script, form: Form) -> list[Change]:
    """Return the lines that matter most on the way to the next rung; empty where they are not certain."""
    if form.rung == 2:
        return []
    return [*(_to_exact(script) if form.rung == 1 else _to_joined(script, form))]


def _to_joined(script: Script, form: Form) -> Iterator[Change]:
    origins = {"accelerate": ACCELERATORS, "fabric": FABRICS}.get(form.kind, (INIT,))
    begin = next(script.calls_of(*origins), None)
    try:
        loops = loops_in(script)
    except RefusalError:
        loops = None
    if begin is not None and form.kind in {"accelerate", "fabric", "ddp", "elsewhere"}:
        after = "run = elasticflow.join()"
        yield _change(script, begin, after if form.kind in {"ddp", "elsewhere"} else f"{after}, before it")
    if loops is not None:
        yield _change(script, loops.batches, "for batch in run.batches(dataset, size=..., epochs=...):")
        last = loops.batches.body[-1]
        yield _change(script, last, "and behind it: run.step(loss=loss)")


def _to_exact(script: Script) -> Iterator[Change]:
    join = next(script.calls_of(JOIN))
    yield _change(script, join, "elasticflow.join(virtual_shards=16)")
    for call in script.calls:
        if called_name(call) == "backward":
            yield _change(script, call, "loss = run.gradients(loss_of, batch)")
            return


def _change(script: Script, node: ast.expr | ast.stmt, after: str) -> Change:
    line = (
        node.end_lineno or node.lineno
        if isinstance(node, ast.stmt) and not isinstance(node, ast.For)
        else node.lineno
    )
    return Change(line, script.lines[line - 1].strip(), after)


def required_arguments(script: Script) -> list[str]:
    """Return the arguments that the script's own parser asks for, as a person types them: `total_epochs`, `--data`."""
    found = []
    for call in script.calls:
        if called_name(call) != "add_argument" or not call.args:
            continue
        names = [
            each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        keywords = {each.arg: each.value for each in call.keywords}
        if not names:
            continue
        count = keywords.get("nargs")
        is_optional = isinstance(count, ast.Constant) and count.value in {"?", "*"}
        required = keywords.get("required")
        is_asked = isinstance(required, ast.Constant) and required.value is True
        if names[0].startswith("-"):
            if is_asked:
                found.append(max(names, key=len))
        elif not is_optional and dotted_name(call.func) != "":
            found.append(names[0])
    return found
