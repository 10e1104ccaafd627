"""What would go wrong on `run.batches`, or is different there, though the loop has a form that is known."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.reading.values import is_preparing
from elasticflow.lint.script.script import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.adopt.reading.kept import Kept
    from elasticflow.adopt.reading.loader import Loader
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.forms import Form

_GATHERING = (
    "gather",
    "all_gather",
    "all_gather_into_tensor",
    "gather_for_metrics",
    "concat_all_gather",
    "all_to_all",
)


def check(loops: Loops, loader: Loader) -> None:
    """Check that no tensors of batches are gathered: of an epoch's last batch ranks have parts of different sizes.

    Raises:
        RefusalError: some may be.
    """
    if loader.drops_last:
        return
    for call in _calls_in_batches(loops):
        gathers = (
            called_name(call) in _GATHERING and call.args and "loss" not in ast.unparse(call.args[0]).lower()
        )
        if gathers:
            raise refuse(
                call, "ranks gather tensors in the loop over batches: of an epoch's last batch run.batches gives them parts of different sizes",
                "drop_last=True for the DataLoader, or a sum and a count of each rank, added up",
            )  # fmt: skip


def notes(loops: Loops, form: Form, kept: Sequence[Kept]) -> Iterator[str]:
    """Yield what a person should know."""
    script = loops.script
    for call in script.calls_of("signal.signal"):
        if any("SIGTERM" in ast.unparse(each) for each in call.args[:1]):
            yield f"line {call.lineno}: this handler of SIGTERM takes the place of the one by which all ranks leave together: take it away"
    if isinstance(form.node, ast.Call):
        named = [each for each in form.node.keywords if each.arg in {"mixed_precision", "precision"}]
        if named and not (
            isinstance(named[0].value, ast.Constant)
            and named[0].value.value in {None, "no", "bf16", "bf16-mixed"}
        ):
            yield f"line {form.node.lineno}: with fp16, the scale of gradients begins anew after a restart: the framework keeps it to itself"

    schedules = {each.text for each in kept if each.name.startswith("scheduler")}
    for call in script.calls:
        if (
            form.kind == "accelerate"
            and is_preparing(call)
            and any(ast.unparse(each) in schedules for each in call.args)
        ):
            yield f"line {call.lineno}: Accelerate moves a schedule once for each worker in every step: where workers come and go, so does the learning rate"


def _calls_in_batches(loops: Loops) -> Iterator[ast.Call]:
    places: list[ast.AST] = [loops.batches]
    places += [function for call in loops.step_calls if (function := loops.script.called(call)) is not None]
    for place in places:
        yield from (node for node in ast.walk(place) if isinstance(node, ast.Call))
