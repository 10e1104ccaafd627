"""The rung of a script, the lines to change for the next rung, and the finished example of its form."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.lint.script.forms import ACCELERATORS, DDP, FABRICS, INIT, JOIN
from elasticflow.python_source.syntax import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.script.forms import Form
    from elasticflow.python_source.script import Script

RUNGS = (
    "torchrun's contract: the script runs as it is; a restart starts it again, at its beginning unless it loads a checkpoint itself",
    "elasticflow.join: snapshots, every sample once, on in the middle of an epoch",
    "run.gradients: the same bits at any number of workers",
)
# Files of examples/ that make the calls, by form. End-to-end tests train each file.
TEMPLATES = {
    "function": "gpt/train_own_loop.py",
    "class": "rungs/tutorial_1.py",
    "accelerate": "own_loop/train_accelerate.py",
    "fabric": "own_loop/train_fabric.py",
    "transformers": "own_loop/train_hf_trainer.py",
}
_PLAIN = ("ddp", "spawned", "elsewhere", "unclear", "alone")
_MOST_HOPS = 5
_KEEP = "run.keep(model=model, optimizer=optimizer, ...)"
_Loop = ast.For | ast.While | ast.AsyncFor
_ENDS = ("torch.distributed.destroy_process_group",)


class Change(NamedTuple):
    """A line of the script, and its replacement on the next rung.

    Attributes:
        line: Number of the line, from 1.
        after: Text that replaces the line, or a remark about it.
    """

    line: int
    before: str
    after: str


def template_of(script: Script, form: Form) -> str | None:
    """Return the key in TEMPLATES of the example to follow; None if `elasticflow.join` does not support the form."""
    if form.kind in {"accelerate", "fabric"}:
        return form.kind
    if form.kind == "trainer":
        return "transformers" if script.origin(_called(form)).startswith("transformers.") else None
    if form.kind not in _PLAIN:
        return None
    backward = next(_backwards(script), None)
    return "function" if backward is None or script.class_of(backward) is None else "class"


def next_changes(script: Script, form: Form) -> list[Change]:
    """Return the lines to change for the next rung, in order; only lines that the text shows for sure."""
    if form.rung == 1:
        return [*_to_exact(script)]
    if form.rung or form.kind not in {"accelerate", "fabric", *_PLAIN}:
        return []
    return sorted({change.line: change for change in _to_joined(script, form)}.values())


def _called(form: Form) -> ast.expr:
    return form.node.func if isinstance(form.node, ast.Call) else ast.Constant(None)


def _to_joined(script: Script, form: Form) -> Iterator[Change]:
    if form.kind in {"accelerate", "fabric"}:
        for call in script.calls_of(*ACCELERATORS, *FABRICS):
            yield _change(script, call, "run = elasticflow.join(), before it")
        for call in script.calls:
            if called_name(call) in {"prepare", "setup"} and call.args:
                yield _change(script, call, f"without loader and schedule; and after it {_KEEP}")
                break
    else:
        for call in script.calls_of(INIT):
            yield _change(script, call, "run = elasticflow.join()")
        for call in script.calls_of(DDP):
            yield _change(script, call, f"{_KEEP}; replicas = run.wrap(model)")
    loops = _loops(script)
    if loops:
        yield from _joined_loops(script, form, *loops)
    for call in script.calls_of(*_ENDS):
        yield _change(script, call, "run.finish()")


def _joined_loops(script: Script, form: Form, batches: _Loop, *outer: _Loop) -> Iterator[Change]:
    # In a script of one process no line stands for the calls around its loop.
    joined = f"before it run = elasticflow.join(), {_KEEP}, replicas = run.wrap(model); after it run.finish()"
    around = f" ({joined})" if form.kind == "alone" else ""
    if outer and isinstance(outer[0], ast.For):
        yield _change(script, outer[0], f"for epoch in run.epochs(...):{around}")
        around = ""
    yield _change(script, batches, f"for batch in run.batches(dataset, size=...):{around}")
    for call in _backwards(script) if form.kind in _PLAIN else ():
        yield _change(script, call, "(loss * batch.share).backward(), for a loss that is a mean")
    last = batches.body[-1]
    yield Change(
        last.end_lineno or last.lineno,
        script.lines[(last.end_lineno or last.lineno) - 1].strip(),
        "and after it, in the loop: run.step(loss=loss)",
    )


def _to_exact(script: Script) -> Iterator[Change]:
    join = next(script.calls_of(JOIN))
    yield _change(script, join, "elasticflow.join(virtual_shards=16)")
    for call in _backwards(script):
        yield _change(script, call, "loss = run.gradients(loss_of, batch)")
        return


def _backwards(script: Script) -> Iterator[ast.Call]:
    """Yield the calls of `backward` that train, without the `backward` of autograd functions."""
    for call in script.calls:
        function = script.function_of(call)
        if called_name(call) == "backward" and (function is None or function.name != "backward"):
            yield call


def _loops(script: Script) -> list[_Loop]:
    """Return the loops around the backward pass, innermost first, through functions with a single caller.

    Empty if that would be a guess: gradients in several functions, a third loop, or an innermost loop that may iterate over
    parts of a batch: it counts, or the loop around it does not count epochs.
    """
    backwards = [*_backwards(script)]
    if not backwards or len({script.function_of(call) for call in backwards}) > 1:
        return []
    loops: list[_Loop] = []
    node: ast.AST = backwards[0]
    for _ in range(_MOST_HOPS):
        for whole, part in script.above(node):
            if isinstance(whole, _Loop) and part in whole.body:
                loops.append(whole)
        function = script.function_of(node)
        callers = [] if function is None else script.callers.get(function, [])
        if len(callers) != 1:
            break
        node = callers[0]
    is_inner = bool(loops) and (
        not isinstance(loops[0], ast.For)
        or _calls(loops[0], "range")
        or any(isinstance(each, ast.For) and _calls(each, "enumerate") for each in loops[1:])
    )
    return [] if is_inner or len(loops) > 2 else loops


def _calls(loop: ast.For, name: str) -> bool:
    """Return True if the head of *loop* calls a function of this name."""
    return any(isinstance(each, ast.Call) and called_name(each) == name for each in ast.walk(loop.iter))


def _change(script: Script, node: ast.expr | ast.stmt, after: str) -> Change:
    return Change(node.lineno, script.lines[node.lineno - 1].strip(), after)
