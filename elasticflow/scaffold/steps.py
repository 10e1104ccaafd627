"""How a model is trained: by a loss of outputs and targets, or by a step that is written for it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.syntax import dotted_names
from elasticflow.scaffold.candidates import method_of, returns_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.scaffold.candidates import Candidate

CROSS_ENTROPY = "torch.nn.functional:cross_entropy"
_NLL = "torch.nn.functional:nll_loss"
_BINARY = "torch.nn.functional:binary_cross_entropy"
_TARGETS = {"target", "targets", "label", "labels", "y", "ys", "y_true", "gt", "ground_truth"}
_IS_LOSS = re.compile(r"(^|_)(loss|nll|criterion|cross_entropy)(_|$)|loss$")

_STEP = '''"""How {model} is trained; written by `elasticflow init`, to be changed as you like."""

from typing import Any

from torch import Tensor, nn
{imports}

def training_step(model: nn.Module, batch: Any) -> {returns}:
    """Return the loss of a batch: {what}."""
{body}
'''


class Step(NamedTuple):
    """A training step for a model.

    Attributes:
        text: Source of its module.
        reason: Why no loss of outputs and targets will do.
        is_draft: A person has to write the loss.
        takes_targets: The model computes the loss from inputs and targets.
    """

    text: str
    reason: str
    is_draft: bool = False
    takes_targets: bool = False


def loss_of_outputs(model: Candidate) -> tuple[str, bool]:
    """Return the loss that fits what `forward` ends in, and whether that is a guess."""
    forward = _forward_of(model)
    calls = {names[-1] for value in _returned(forward) for names in [_called(value)] if names}
    layers = [] if model.made is None else [n for n in ast.walk(model.made) if isinstance(n, ast.Call)]
    made = {names[-1] for call in layers if (names := dotted_names(call.func))}
    if "log_softmax" in calls or "LogSoftmax" in made:
        return _NLL, False
    return (_BINARY, True) if calls & {"sigmoid"} or "Sigmoid" in made else (CROSS_ENTROPY, True)


def step_for(model: Candidate, losses: Iterable[ast.FunctionDef], module: str) -> Step | None:
    """Return a step for a model that no loss of outputs and targets trains; None if one does, or reading does not tell.

    Args:
        model: The model.
        losses: Functions of the model's module that compute a loss of more than outputs and targets.
        module: The model's module.
    """
    if model.made is None:
        return None
    own = method_of(model.made, "training_step", model.classes)
    forward = _forward_of(model)
    if own is not None and len(own.args.args) >= 2:
        given = "batch, 0" if len(own.args.args) > 2 else "batch"
        lines = [
            f"outputs = model.training_step({given})",
            'return outputs["loss"] if isinstance(outputs, dict) else outputs',
        ]
        return _step(model, lines, "the one that the model's own training_step returns", "Any",
                     reason=f"{model.name} has a training_step of its own")  # fmt: skip
    if forward is None:
        return None
    inputs, targets = _inputs_of(forward)
    returned = _returned(forward)
    of_loss = [how for value in returned if (how := _loss_in(value)) is not None]
    if of_loss:
        return _own_loss(model, inputs, targets, of_loss[-1])
    outputs = next((value for value in returned if isinstance(value, ast.Tuple)), None)
    if outputs is None and len(inputs) <= 1 and targets is None:
        return None
    for function in losses:
        step = _matched(model, inputs, outputs, function, module)
        if step is not None:
            return step
    return _draft(model, inputs, targets, outputs)


def _own_loss(model: Candidate, inputs: list[str], targets: str | None, how: str) -> Step:
    reason = f"{model.name}.forward computes the loss itself"
    what = "the model computes it itself"
    if targets is None:
        lines = ["inputs = batch[0] if isinstance(batch, list | tuple) else batch"]
        call = "model(inputs)"
    elif "input_ids" in inputs:
        lines, call = [], "model(**batch)"
    elif len(inputs) == 1:
        lines, call = ["inputs, targets = batch"], f"model(inputs, {targets}=targets)"
    else:
        lines, call = ["*inputs, targets = batch"], f"model(*inputs, {targets}=targets)"
    lines.append(f"return {call}{how}")
    return _step(model, lines, what, "Tensor", reason=reason, takes_targets=targets is not None)


def _matched(
    model: Candidate, inputs: list[str], outputs: ast.Tuple | None, function: ast.FunctionDef, module: str
) -> Step | None:
    """Return a step that calls a loss of the module, if names tell what each of its arguments is."""
    if outputs is None or len(inputs) != 1:
        return None
    names = [each.id if isinstance(each, ast.Name) else "" for each in outputs.elts]
    wanted = [each.arg for each in function.args.args]
    expressions = {name: f"outputs[{number}]" for number, name in enumerate(names) if name in wanted}
    expressions |= {inputs[0]: "inputs"} if inputs[0] in wanted else {}
    open_names = [name for name in wanted if name not in expressions]
    rest = [number for number, name in enumerate(names) if name not in expressions]
    if len(open_names) != 1 or len(rest) != 1:
        return None
    expressions[open_names[0]] = f"outputs[{rest[0]}]"
    is_sum = "reduction='sum'" in ast.unparse(function)
    call = f"{function.name}({', '.join(expressions[name] for name in wanted)})"
    lines = [
        "inputs = batch[0] if isinstance(batch, list | tuple) else batch",
        "outputs = model(inputs)",
        f"return {call}, len(inputs)" if is_sum else f"return {call}",
    ]
    what = f"{function.name} of what the model returns" + (
        ", a sum, and of how many samples" if is_sum else ""
    )
    return _step(
        model, lines, what, "tuple[Tensor, int]" if is_sum else "Tensor",
        reason=f"{model.name}.forward returns {len(names)} values, which {function.name} takes",
        imports=f"\nfrom {module} import {function.name}\n",
    )  # fmt: skip


def _draft(model: Candidate, inputs: list[str], targets: str | None, outputs: ast.Tuple | None) -> Step:
    takes = [*inputs, *([targets] if targets else [])]
    facts = [f"takes {', '.join(takes)}"]
    if outputs is not None:
        facts.append(f"returns ({', '.join(ast.unparse(each) for each in outputs.elts)})")
    text = " and ".join(facts)
    lines = [
        f"# {model.name}.forward {text}: call it with what `batch` holds, and return the loss.",
        f'raise NotImplementedError("write the loss of {model.name} here")',
    ]
    reason = f"{model.name}.forward {text}: its loss is no function of outputs and targets"
    return _step(model, lines, "a mean over its samples", "Tensor", reason=reason, is_draft=True)


def _step(
    model: Candidate,
    lines: list[str],
    what: str,
    returns: str,
    *,
    reason: str,
    imports: str = "",
    is_draft: bool = False,
    takes_targets: bool = False,
) -> Step:
    body = "\n".join(f"    {line}" for line in lines)
    text = _STEP.format(model=model.name, imports=imports, returns=returns, what=what, body=body)
    if "Tensor" not in returns:
        text = text.replace("from torch import Tensor, nn", "from torch import nn")
    return Step(text, reason, is_draft, takes_targets)


def _forward_of(model: Candidate) -> ast.FunctionDef | None:
    return None if model.made is None else method_of(model.made, "forward", model.classes)


def _inputs_of(forward: ast.FunctionDef) -> tuple[list[str], str | None]:
    """Return the inputs that `forward` needs, and the argument that takes targets."""
    arguments = forward.args
    places = [*arguments.posonlyargs, *arguments.args][1:]
    num_required = len(places) - len(arguments.defaults)
    required = [each.arg for each in places[:num_required]]
    names = [each.arg for each in (*places, *arguments.kwonlyargs)]
    targets = next((name for name in names[1:] if name.lower() in _TARGETS), None)
    return [name for name in required if name != targets], targets


def _returned(forward: ast.FunctionDef | None) -> list[ast.expr]:
    """Return what `forward` returns; in place of a name what was last assigned to it, where that tells more."""
    if forward is None:
        return []
    assigned: dict[str, ast.expr] = {}
    for each in ast.walk(forward):
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            assigned[each.targets[0].id] = each.value
    values = []
    for value in returns_of(forward):
        meant = assigned.get(value.id, value) if isinstance(value, ast.Name) else value
        is_telling = not isinstance(value, ast.Name) or not _IS_LOSS.search(value.id)
        values.append(meant if is_telling else value)
    return values


def _loss_in(value: ast.expr) -> str | None:
    """Return how the loss is taken out of what `forward` returns; None if it is not seen there."""
    match value:
        case ast.Tuple(elts=elts):
            names = [_name_of(each) for each in elts]
            at = next((number for number, name in enumerate(names) if _IS_LOSS.search(name)), None)
            return None if at is None else f"[{at}]"
        case ast.Dict(keys=keys):
            is_there = any(isinstance(key, ast.Constant) and key.value == "loss" for key in keys)
            return '["loss"]' if is_there else None
        case ast.Call(keywords=keywords) if any(each.arg == "loss" for each in keywords):
            return ".loss"
        case _:
            return "" if _IS_LOSS.search(_name_of(value)) else None


def _name_of(value: ast.expr) -> str:
    names = _called(value) or dotted_names(value)
    return names[-1] if names else ""


def _called(value: ast.expr) -> list[str]:
    return dotted_names(value.func) if isinstance(value, ast.Call) else []


def losses_in(text: str) -> list[ast.FunctionDef]:
    """Return the functions of a module that compute a loss of more than two values."""
    return [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and _IS_LOSS.search(node.name)
        and len(node.args.args) - len(node.args.defaults) > 2
    ]
