"""Scripts that a restart begins anew: they load no checkpoint, or only by an argument or a trainer's call."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.rules.saves import state_loads, state_saves
from elasticflow.lint.script.forms import form_of, trains
from elasticflow.lint.script.options import Options
from elasticflow.lint.script.values import is_repeated
from elasticflow.python_source.syntax import argument, called_name, has_unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.lint.script.options import Option
    from elasticflow.python_source.script import Function, Script

_SAVING = re.compile(r"save|checkpoint|ckpt|snapshot|dump|persist", re.IGNORECASE)
_TRAINERS = ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer")
_HF_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer")
_TESTS = re.compile(r"eval|infer|(^|_)test|predict|valid|sampl|generat|demo|export|distill", re.IGNORECASE)
_RESUMES = re.compile(r"resum|continu|checkpoint|ckpt|restart|restor|init_from|snapshot|load", re.IGNORECASE)
_BEGINS = "the same command is for the first start and for each restart"
_LOOK = f"have the script load its newest checkpoint when it begins, if there is one: {_BEGINS}"


def never_loaded(view: View) -> Iterator[Finding]:
    """Yield the first save of a script that loads nothing, or its backward pass if it saves nothing either."""
    script = view.script
    backward = next((call for call in script.calls if called_name(call) == "backward"), None)
    if backward is None or form_of(script).kind == "joined" or not trains(script) or _may_load(script):
        return
    if script.names.modules & {"unittest", "pytest"}:
        return
    if saves := state_saves(script):
        first = next((each for each in saves if is_repeated(script, each)), saves[0])
        yield Finding(
            codes.LINT_NEVER_LOADED,
            first.func,
            "no start of this script loads what is saved here: after a kill training begins again at its first step",
            _LOOK,
        )
    elif not _SAVING.search(" ".join(_names_in(script))) and is_repeated(script, backward):
        yield Finding(
            codes.LINT_NEVER_LOADED,
            backward.func,
            "this file neither saves nor loads a checkpoint: after a kill training begins again at its first step",
            f"save one now and then; {_LOOK}",
        )


def _may_load(script: Script) -> bool:
    """Return whether state may be loaded: by this file, by a function of another file, or by a receiver of the path."""
    return bool(_loads_to_train(script)) or any(
        keyword.arg and re.search(r"resume|ckpt|checkpoint|restore|load_from", keyword.arg)
        for call in script.calls
        for keyword in call.keywords
        if not script.origin(call.func).startswith(("wandb.", "torch.utils.checkpoint", "builtins."))
        and called_name(call) != "add_argument"
        and not called_name(call).startswith("save")
        and script.called(call) is None
    )


def _names_in(script: Script) -> set[str]:
    """Return the names that a script uses, defines or imports, without names in comments and strings."""
    names = {each.id for each in script.nodes if isinstance(each, ast.Name)}
    names |= {each.attr for each in script.nodes if isinstance(each, ast.Attribute)}
    return names | {each.name for each in script.nodes if isinstance(each, ast.alias | ast.FunctionDef)}


def _loads_to_train(script: Script) -> list[ast.Call]:
    """Return the calls that may load state for training, without calls after training or under an option for tests."""
    options = Options(script)
    loads = [call for call in state_loads(script) if not _is_after_training(script, call)]
    guards = [(call, _guard_of(script, options, call)) for call in loads]
    return [call for call, guard in guards if guard is None or not _TESTS.search(guard.name)]


def loaded_by_argument(view: View) -> Iterator[Finding]:
    """Yield the first load of a script that loads state only by an option, which is off by default."""
    script = view.script
    if form_of(script).kind == "joined" or not trains(script):
        return
    if not any(_SAVING.search(called_name(call)) for call in script.calls):
        return
    options = Options(script)
    loads = [(call, _guard_of(script, options, call)) for call in _loads_to_train(script)]
    guarded = [(call, guard) for call, guard in loads if guard is not None]
    if not loads or len(guarded) < len(loads):
        return
    # Besides loads that resume from a checkpoint, others may load pretrained weights.
    meant = [each for each in guarded if _RESUMES.search(each[1].name)] or guarded
    load, option = meant[0]
    how = " or ".join(dict.fromkeys(guard.spelling for _, guard in meant))
    value = "off by default" if how.startswith("-") else f"{option.default!r} here"
    yield Finding(
        codes.LINT_LOADED_BY_ARGUMENT,
        load.func,
        f"a checkpoint is loaded only by {how}, which is {value}: a restart runs the same command, and without it begins at the first step",
        _LOOK,
    )


def _guard_of(script: Script, options: Options, node: ast.AST, hops: int = 4) -> Option | None:
    """Return the option without which a place is not reached; None if it may be reached."""
    for whole, part in script.above(node):
        if isinstance(whole, ast.If) and part is not whole.test:
            value, option = options.by_default(whole.test)
            if value is not None and option is not None and value is not (part in whole.body):
                return option
    function = script.function_of(node)
    if function is None or not hops:
        return None
    for statement in function.body:
        if statement.lineno < getattr(node, "lineno", 0) and isinstance(statement, ast.If):
            value, option = options.by_default(statement.test)
            if value and option is not None and isinstance(statement.body[-1], ast.Return):
                return option
    calls = [call for call in script.callers.get(function, []) if script.function_of(call) is not function]
    guards = [_guard_of(script, options, call, hops - 1) for call in calls]
    return guards[0] if guards and all(guard is not None for guard in guards) else None


def _is_after_training(script: Script, node: ast.AST, hops: int = 4) -> bool:
    """Return whether a place comes after the training loop, where the best weights are loaded for a test."""
    function = script.function_of(node)
    if end := _end_of_training(script, function):
        return getattr(node, "lineno", 0) > end
    if function is None or not hops:
        return False
    calls = script.callers.get(function, [])
    return bool(calls) and all(_is_after_training(script, call, hops - 1) for call in calls)


# A script may load at many places after one loop.
@lru_cache(maxsize=256)
def _end_of_training(script: Script, function: Function | None) -> int:
    """Return the last line of the loops in a function, or in the module, that train; 0 if none does."""
    block = script.tree.body if function is None else function.body
    loops = (each for each in _flat(block) if isinstance(each, ast.For | ast.While))
    return max((each.end_lineno or 0 for each in loops if _trains_in(script, each)), default=0)


def _flat(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of its conditions, but not of its loops."""
    for statement in block:
        yield statement
        if isinstance(statement, ast.If | ast.With | ast.Try):
            yield from _flat(statement.body)
            yield from _flat(getattr(statement, "orelse", []))


def _trains_in(script: Script, node: ast.AST, hops: int = 4) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    if any(called_name(call) == "backward" for call in calls):
        return True
    functions = {function for call in calls if (function := script.called(call)) is not None}
    return bool(hops) and any(_trains_in(script, function, hops - 1) for function in functions)


def trainer_without_checkpoint(view: View) -> Iterator[Finding]:
    """Yield each training call of a library's trainer that gets no checkpoint to resume from."""
    script = view.script
    if not trains(script) and not any(script.calls_of(*_TRAINERS, *_HF_TRAINERS)):
        return
    if re.search(r"resume_from_checkpoint|ckpt_path", script.text):
        return
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute) or has_unpacked(call):
            continue
        made = _makers(script, call.func.value)
        if call.func.attr == "fit" and made & set(_TRAINERS) and argument(call, "ckpt_path", 4) is None:
            yield Finding(
                codes.LINT_TRAINER_BEGINS,
                call.func,
                "fit() without ckpt_path begins at the first step, also after a kill",
                'pass ckpt_path="last", and ModelCheckpoint(dirpath=FOLDER, save_last=True) to the Trainer: without dirpath each start looks in a new folder',
            )
        elif call.func.attr == "train" and made & set(_HF_TRAINERS) and not call.args:
            yield Finding(
                codes.LINT_TRAINER_BEGINS,
                call.func,
                "train() without resume_from_checkpoint begins at the first step, also after a kill",
                "pass resume_from_checkpoint=get_last_checkpoint(output_dir) if that folder exists, else None (transformers.trainer_utils)",
            )


def _makers(script: Script, node: ast.expr) -> set[str]:
    """Return the possible classes of an object, by the calls that the file assigns to its name."""
    if isinstance(node, ast.Call):
        return {script.origin(node.func)}
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Name):
        values = script.names.assigned(node.id)
    return {script.origin(each.func) for each in values if isinstance(each, ast.Call)}
