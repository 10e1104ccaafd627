"""Names for what a patch adds, which a script does not have yet; and where they are seen."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.adopt.reading.refusal import refuse

if TYPE_CHECKING:
    from elasticflow.adopt.edits import Editor
    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.script import Function

_BY_HAND = "write the loop on run.batches by hand: `elasticflow guide own-loop`"


@dataclass
class Chosen:
    """Names that are free.

    Attributes:
        run: Of what `elasticflow.join` returns.
        batches: Of the iterator over batches, where the epochs are counted.
        batches_inside: The same where the batches are gone over.
        batch: Of one batch there.
        done: Of how many batches of the epoch are done.
        starred: Functions that have got a parameter behind a star.
    """

    run: str
    batches: str
    batches_inside: str
    batch: str
    done: str
    starred: set[Function] = field(default_factory=set)

    @staticmethod
    def of(loops: Loops) -> Chosen:
        """Return free names for a script."""
        taken = {node.id for node in loops.script.nodes if isinstance(node, ast.Name)}
        taken |= {node.arg for node in loops.script.nodes if isinstance(node, ast.arg)}
        taken |= {node.attr for node in loops.script.nodes if isinstance(node, ast.Attribute)}
        taken |= {*loops.script.functions, *loops.script.classes}
        taken |= {alias.asname or alias.name.partition(".")[0] for node in loops.script.nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip

        def free(*names: str) -> str:
            return next(name for name in (*names, *(f"{names[0]}_{number}" for number in range(2, 99))) if name not in taken)  # fmt: skip

        run, batches, batch = free("run", "own_run"), free("batches", "own_batches"), free("batch", "part")
        owner = f"self.{batches}" if _is_one_object(loops) else batches
        return Chosen(run, owner, owner, batch, free("done", "batches_done"))


def _is_one_object(loops: Loops) -> bool:
    """Return whether the loops stand in different methods of one object."""
    script = loops.script
    here, there = script.function_of(loops.epochs), script.function_of(loops.batches)
    if here is there or here is None or there is None:
        return False
    owner = script.class_of(here)
    return owner is not None and owner is script.class_of(there) and all(ast.unparse(call.func).startswith("self.") for call in loops.epoch_calls)  # fmt: skip


def pass_on(
    loops: Loops, editor: Editor, chosen: Chosen, calls: tuple[ast.Call, ...], name: str, value: str
) -> None:
    """Give each function on the way one more parameter, and each call one more argument.

    Raises:
        RefusalError: a function takes what its text does not show, or is called elsewhere, too.
    """
    script = loops.script
    for number, call in enumerate(calls):
        function = script.called(call)
        if (
            function is None
            or function.args.vararg
            or function.args.kwarg
            or len(script.callers.get(function, [])) != 1
        ):
            raise refuse(call, f"{ast.unparse(call.func)} cannot be given the batches for certain", _BY_HAND)
        given = value if number == 0 else name
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        editor.insert_at(_behind(editor, call, arguments), f"{', ' if arguments else ''}{name}={given}")
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        # Behind parameters with defaults: a keyword.
        has_star = not function.args.defaults or bool(function.args.kwonlyargs) or function in chosen.starred
        chosen.starred.add(function)
        star = "" if has_star else "*, "
        nodes: list[ast.expr | ast.arg] = [*parameters, *function.args.defaults, *(each for each in function.args.kw_defaults if each), *(each.annotation for each in parameters if each.annotation)]  # fmt: skip
        if not nodes:
            raise refuse(call, f"{function.name} takes no argument that another could stand behind", _BY_HAND)
        editor.insert_at(max(editor.span(each)[1] for each in nodes), f", {star}{name}")


def _behind(editor: Editor, call: ast.Call, arguments: list[ast.expr]) -> int:
    if not arguments:
        return editor.span(call)[1] - 1
    last = max(arguments, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0))
    return editor.span(last)[1]
