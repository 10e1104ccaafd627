"""What moves a model in a training loop: optimizers, schedules, gradient scalers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.loops import steps_of
from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.reading.values import definitions
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.adopt.reading.loops import Loops

_BY_HAND = "run.keep(model=model, optimizer=optimizer, ...) names all that training changes: `elasticflow guide own-loop`"
_PROFILERS = ("torch.profiler.", "torch.autograd.profiler.")
_NAMES = {"optim": "optimizer", "opt": "optimizer", "sched": "scheduler", "scaler": "scaler"}


def moved_in(loops: Loops) -> dict[str, str]:
    """Return all whose `step` the training loops call, as the function of the loop over epochs has them, with a name for each.

    Raises:
        RefusalError: what something is, or what the loop over epochs calls it, is not certain.
    """
    found: dict[str, str] = {}
    known: set[ast.expr] = set()
    for call, owner in _owners(loops):
        made = [each.node for each in definitions(loops.script, owner)]
        origins = {loops.script.origin(each.func) for each in made if isinstance(each, ast.Call)}
        if any(origin.startswith(_PROFILERS) for origin in origins):
            continue
        text = _as_outside(loops, call, owner)
        if not text:
            raise refuse(
                call, f"what {ast.unparse(owner)} is, where the epochs are counted, is not certain", _BY_HAND
            )
        name = _name(text.rpartition(".")[2], origins)
        if name is None:
            raise refuse(call, f"what {text} is, whose step() is called, is not certain", _BY_HAND)
        known |= {*made}
        if text not in found:
            number = sum(each.rstrip("0123456789") == name for each in found.values())
            found[text] = f"{name}{number + 1}" if number else name
    _check_others(loops, known)
    return found


def _owners(loops: Loops) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield each call of `step` and of a scaler's methods in the training loops, and what it is called of or given."""
    script = loops.script
    inner = steps_of(loops)
    outer = [
        call
        for call in script.calls
        if called_name(call) == "step" and script.called(call) is None and call not in inner and loops.epochs in (whole for whole, _ in script.above(call))
    ]  # fmt: skip
    for call in (*inner, *outer):
        if isinstance(call.func, ast.Attribute):
            # A scaler is given the optimizer that moves.
            yield from ((call, each) for each in call.args[:1] if _moves(loops, each))
            yield call, call.func.value
    for call in loops.backwards:
        scaled = call.func.value if isinstance(call.func, ast.Attribute) else call
        if (
            isinstance(scaled, ast.Call)
            and isinstance(scaled.func, ast.Attribute)
            and scaled.func.attr == "scale"
        ):
            yield call, scaled.func.value


def _moves(loops: Loops, node: ast.expr) -> bool:
    made = (
        loops.script.origin(each.node.func)
        for each in definitions(loops.script, node)
        if isinstance(each.node, ast.Call)
    )
    return bool(dotted_name(node)) and (
        any(each.startswith("torch.optim.") for each in made) or "optim" in dotted_name(node).lower()
    )


def _check_others(loops: Loops, known: set[ast.expr]) -> None:
    """Check that no optimizer or schedule moves where the loops do not show it: in a function called behind an epoch."""
    script = loops.script
    for call in script.calls:
        if called_name(call) != "step" or not isinstance(call.func, ast.Attribute):
            continue
        made = [each.node for each in definitions(script, call.func.value) if isinstance(each.node, ast.Call)]
        if any(script.origin(each.func).startswith("torch.optim.") for each in made) and not {*made} & known:
            raise refuse(
                call,
                f"{ast.unparse(call.func.value)} moves where the training loop does not show it",
                _BY_HAND,
            )


def _as_outside(loops: Loops, call: ast.Call, owner: ast.expr) -> str | None:
    function = loops.script.function_of(call)
    if function is loops.script.function_of(loops.epochs):
        return dotted_name(owner)
    if function is loops.script.function_of(loops.batches):
        return loops.outside(owner)
    return loops.outside_step(owner)


def _name(last: str, origins: set[str]) -> str | None:
    for origin in origins:
        if origin.startswith("torch.optim.lr_scheduler.") or "schedule" in origin.rpartition(".")[2].lower():
            return "scheduler"
        if origin.startswith("torch.optim."):
            return "optimizer"
        if origin.endswith(".GradScaler"):
            return "scaler"
    return next((name for word, name in _NAMES.items() if word in last.lower()), None)
