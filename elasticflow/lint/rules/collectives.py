"""Collectives that only some ranks reach, or that a signal handler calls."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.python_source.script import Function
from elasticflow.python_source.syntax import argument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.lint.script.collectives import Reached, Split

_SERVES = "for ever, or until the process group's timeout"


def collectives_of_some_ranks(view: View) -> Iterator[Finding]:
    """Yield each collective that only rank 0, or all ranks but rank 0, enter."""
    script = view.script
    groups: dict[ast.AST, list[Split]] = {}
    for scope in (script.tree, *(each for several in script.functions.values() for each in several)):
        # A pair such as "the others wait, rank 0 goes ahead" may be spread over the methods of one class.
        whole = scope if isinstance(scope, ast.Module) else script.class_of(scope) or scope
        groups.setdefault(whole, []).extend(view.collectives.splits(scope))
    for splits in groups.values():
        if len({split.side for split in splits}) == 1:
            yield from (_of_split(split) for split in splits)


def _of_split(split: Split) -> Finding:
    name, others = _called(split.reached), split.side.opposite.value
    if split.is_after_exit:
        return Finding(
            codes.LINT_NOT_REACHED,
            split.reached.call,
            f"{name} waits for all ranks, and {others} left in line {split.cause.lineno}",
            f"let all ranks reach it: put what only {split.side.value} does under the condition, and leave after the collective",
            "error",
        )
    return Finding(
        codes.LINT_UNDER_RANK,
        split.reached.call,
        f"{name} waits for all ranks, and only {split.side.value} come{'s' if split.side.value == 'rank 0' else ''} here (line {split.cause.lineno})",
        "call it on every rank, outside the condition, or have the other ranks call it, too",
        "error",
    )


def _called(reached: Reached) -> str:
    if reached.is_direct:
        return f"{reached.collective}()"
    return f"{ast.unparse(reached.call.func)}(), which calls {reached.collective}() in line {reached.line},"


def collectives_in_handlers(view: View) -> Iterator[Finding]:
    """Yield each signal handler of the file that calls a collective."""
    script = view.script
    for call in script.calls_of("signal.signal", "asyncio.loop.add_signal_handler"):
        handler = argument(call, "handler", 1)
        body: list[ast.AST] = []
        if isinstance(handler, ast.Lambda):
            body = [handler.body]
        elif handler is not None and isinstance(function := script.meant(handler), Function):
            body = [*function.body]
        reached = view.collectives.first_of(body)
        if reached is not None:
            yield Finding(
                codes.LINT_IN_HANDLER,
                reached.call,
                f"{_called(reached)} in a signal handler: ranks get signals at different moments, inside other collectives, and wait {_SERVES}",
                "have the handler set a flag, and let all ranks agree on it after a step",
                "error",
            )
