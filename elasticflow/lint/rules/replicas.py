"""Replication of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.script.forms import DDP
from elasticflow.python_source.syntax import argument, is_constant

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.python_source.script import Script

_CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


def unused_parameters(view: View) -> Iterator[Finding]:
    """Yield each DDP whose `find_unused_parameters=True` is harmful, beside other options or checkpointing."""
    script = view.script
    for call in script.calls_of(DDP):
        keyword = next((each for each in call.keywords if each.arg == "find_unused_parameters"), None)
        if keyword is None or not is_constant(keyword.value, True):
            continue
        if is_constant(argument(call, "static_graph"), True):
            yield Finding(
                codes.LINT_FIND_UNUSED,
                keyword,
                "static_graph=True finds unused parameters once; find_unused_parameters=True would look for them in every step",
                "leave find_unused_parameters out",
            )
        elif (line := _reentrant(script)) is not None:
            yield Finding(
                codes.LINT_FIND_UNUSED,
                keyword,
                f"with the reentrant activation checkpointing of line {line} a parameter is marked ready twice, and the backward pass fails",
                "pass use_reentrant=False to checkpoint()",
            )
        else:
            yield Finding(
                codes.LINT_FIND_UNUSED,
                keyword,
                "find_unused_parameters=True walks the graph in every step, and hides parameters that never get a gradient",
                "leave it out if every step uses all parameters; static_graph=True if the unused ones are always the same",
                "note",
            )


def _reentrant(script: Script) -> int | None:
    """Return the line that selects reentrant activation checkpointing; None if there is none."""
    checkpoints: list[ast.Call] = list(script.calls_of(*_CHECKPOINTS))
    reentrant = [call for call in checkpoints if is_constant(argument(call, "use_reentrant"), True)]
    return reentrant[0].lineno if reentrant and len(reentrant) == len(checkpoints) else None
