"""What a snapshot has to hold: the model, what moves it, and whatever else the script's own checkpoint holds."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.adopt.reading.moved import moved_in
from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.reading.values import assignments, definitions, is_preparing
from elasticflow.lint.script.forms import DDP
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import argument, called_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.adopt.reading.loops import Loops
    from elasticflow.lint.script.forms import Kind
    from elasticflow.lint.script.script import Script

_BY_HAND = "run.keep(model=model, optimizer=optimizer, ...) names all that training changes: `elasticflow guide own-loop`"


class Kept(NamedTuple):
    """One thing that `run.keep` is given.

    Attributes:
        name: Its name there.
        text: The expression, in the function of the loop over epochs. What Accelerate and Fabric have put around it, `keep` takes away.
    """

    name: str
    text: str


def kept_by(loops: Loops, kind: Kind) -> list[Kept]:
    """Return what `run.keep` is to be given, the model first.

    Raises:
        RefusalError: that is not certain, or not to be had where the loop over epochs stands.
    """
    moved = moved_in(loops)
    model = _model(loops, kind, set(moved))
    found = {model: "model"} | moved
    if not any(name.startswith("optimizer") for name in moved.values()):
        raise refuse(loops.batches, "which optimizer moves the model is not certain", _BY_HAND)
    for text, node in _in_checkpoints(loops):
        if text in found or text in _wrapped(loops.script):
            continue
        if not _is_made_before(loops, text):
            raise refuse(node, f"the script's own checkpoint holds {text}, too, which the loop over epochs does not see", f"{_BY_HAND}: with {text}")  # fmt: skip
        found[text] = text.rpartition(".")[2]
    for text, node in _averages(loops, {model, f"{model}.module", *_wrapped(loops.script)}):
        if text in found:
            continue
        if not _is_made_before(loops, text):
            raise refuse(node, f"{text} seems to follow the model, and the loop over epochs does not see it", f"{_BY_HAND}: with {text}")  # fmt: skip
        found[text] = text.rpartition(".")[2]
    _check_rebound(loops, found)
    return [Kept(name, text) for text, name in found.items()]


def _wrapped(script: Script) -> set[str]:
    """Return what models are called that DistributedDataParallel wraps: `model` of `replicas = DDP(model)`."""
    given = (argument(call, "module", 0) for call in script.calls_of(DDP))
    return {dotted_name(each) for each in given if each is not None}


def _model(loops: Loops, kind: Kind, moved: set[str]) -> str:
    script = loops.script
    if kind == "ddp":
        wraps = list(script.calls_of(DDP))
        if len(wraps) != 1:
            raise refuse(wraps[1], "several models are wrapped in DistributedDataParallel", _BY_HAND)
        seen = _variable_of(loops, wraps[0])
        if seen is not None:
            return seen
        target = _assigned_to(script, wraps[0]) or argument(wraps[0], "module", 0)
        return _as_outside(loops, target, wraps[0])
    candidates: dict[str, ast.AST] = {}
    for call in (each for each in script.calls if is_preparing(each)):
        for given, target in zip(call.args, _targets(script, call), strict=False):
            if target is None or any(_is_no_model(script, each.node) for each in definitions(script, given)):
                continue
            text = _as_outside(loops, target, call)
            if text not in moved:
                candidates.setdefault(text, call)
    if len(candidates) != 1:
        node = next(iter(candidates.values()), loops.batches)
        what = ", ".join(candidates) or "none"
        raise refuse(node, f"which model is trained is not certain: {what}", _BY_HAND)
    return next(iter(candidates))


def _variable_of(loops: Loops, call: ast.Call) -> str | None:
    """Return the variable of the function of the loop over epochs that holds what a call made, if one does for certain."""
    script = loops.script
    home = script.function_of(loops.epochs)
    names = {
        node.id: node
        for node in ast.walk(home or script.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and script.function_of(node) is home
    }
    found = [
        name for name, node in names.items() if any(each.node is call for each in definitions(script, node))
    ]
    return found[0] if len(found) == 1 else None


def _is_no_model(script: Script, node: ast.expr) -> bool:
    origin = script.origin(node.func) if isinstance(node, ast.Call) else ""
    return origin.endswith(".DataLoader") or origin.startswith("torch.optim.") or "schedule" in origin.lower()


def _targets(script: Script, call: ast.Call) -> list[ast.expr | None]:
    statement = script.parents.get(call)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    if isinstance(target, ast.Tuple | ast.List):
        return [each if dotted_name(each) else None for each in target.elts]
    return [target]


def _assigned_to(script: Script, call: ast.Call) -> ast.expr | None:
    whole = script.parents.get(call)
    if isinstance(whole, ast.Assign) and len(whole.targets) == 1 and dotted_name(whole.targets[0]):
        return whole.targets[0]
    return None


def _as_outside(loops: Loops, node: ast.expr | None, place: ast.AST) -> str:
    """Return a variable as the function of the loop over epochs calls it, wherever in the file it is assigned.

    Raises:
        RefusalError: that is not certain.
    """
    script = loops.script
    text = "" if node is None else dotted_name(node)
    home = script.function_of(loops.epochs)
    if text and node is not None:
        here = script.function_of(node)
        if here is home or here is None:
            return text
        if text.startswith("self.") and home is not None and script.class_of(node) is script.class_of(home):
            return text
        for parameter in _parameters(home):
            # What is passed for a parameter, be it here or on the way there.
            if any(node in _ways(script, value) for value in _given(script, home, parameter)):
                return parameter
    raise refuse(place, f"{text or 'the model'} is made where the loop over epochs does not see it", _BY_HAND)


def _parameters(function: ast.AST | None) -> list[str]:
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _given(script: Script, function: ast.AST | None, name: str) -> list[ast.expr]:
    from elasticflow.adopt.reading.values import given

    return given(script, function, name) if isinstance(function, ast.FunctionDef) else []


def _ways(script: Script, value: ast.expr) -> list[ast.AST]:
    """Return the targets of the assignments that a variable gets its value by."""
    return [
        each
        for statement, _, _ in assignments(script, value)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [])
        for each in ast.walk(target)
        if ast.unparse(each) == ast.unparse(value)
    ]


def _in_checkpoints(loops: Loops) -> Iterator[tuple[str, ast.Call]]:
    """Yield what the script's own checkpoints hold: whose `state_dict` is called where the epochs are counted, or in that class."""
    script = loops.script
    home = script.function_of(loops.epochs)
    owner = None if home is None else script.class_of(home)
    for call in script.calls:
        if called_name(call) != "state_dict" or not isinstance(call.func, ast.Attribute):
            continue
        text = dotted_name(call.func.value).removesuffix(".module").removesuffix("._orig_mod")
        is_own = owner is not None and text.startswith("self.") and script.class_of(call) is owner
        if text and text != "self" and (is_own or script.function_of(call) is home):
            made = {
                called_name(each.node)
                for each in definitions(script, call.func.value)
                if isinstance(each.node, ast.Call)
            }
            if not made & {"unwrap_model", "unwrap"}:
                yield text, call


def _averages(loops: Loops, models: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield averages and copies of models by their variables: they change with the model, and no optimizer knows them."""
    script = loops.script
    for call in script.calls:
        owner = script.parents.get(call)
        origin = script.origin(call.func)
        is_average = origin.endswith(
            ("AveragedModel", "ModelEma", "ModelEmaV2", "ModelEmaV3", "ExponentialMovingAverage")
        )
        is_copy = origin == "copy.deepcopy" and any(dotted_name(each) in models for each in call.args)
        if not isinstance(owner, ast.Assign) or not (is_average or is_copy):
            continue
        text = dotted_name(owner.targets[0])
        if text and (is_average or _is_used(loops, text)):
            yield text, call


def _is_used(loops: Loops, text: str) -> bool:
    """Return whether the loop over epochs does something with a variable."""
    return any(
        isinstance(node, ast.Name | ast.Attribute) and dotted_name(node) == text
        for node in ast.walk(loops.epochs)
    )


def _check_rebound(loops: Loops, names: Iterable[str]) -> None:
    """Check that what is kept, and the loader, are the same things in every epoch."""
    outside = loops.outside(loops.loader)
    wanted = {*names, *([outside] if outside else [])}
    for node in ast.walk(loops.epochs):
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted_name(node) in wanted
        ):
            raise refuse(node, f"{dotted_name(node)} is another one in each epoch", _BY_HAND)


def _is_made_before(loops: Loops, text: str) -> bool:
    """Return whether a variable is assigned once, in the function of the loop over epochs, before it and in any case."""
    home = loops.script.function_of(loops.epochs)
    block = loops.script.tree.body if home is None else home.body
    return any(
        isinstance(statement, ast.Assign)
        and statement.lineno < loops.epochs.lineno
        and any(dotted_name(target) == text for target in statement.targets)
        for statement in block
    )
