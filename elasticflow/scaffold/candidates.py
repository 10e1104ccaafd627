"""What in a source file could be the model, the data, the loss of a job; found by reading (floor 2, pure)."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from elasticflow.spec.entries.origins import dotted_names

Kind = Literal["model", "dataset", "loss", "step"]
_OF_TORCH_NN = {"Sequential", "ModuleList", "ModuleDict", "Transformer", "RNN", "LSTM", "GRU"}
_DATASETS = {"Dataset", "TensorDataset", "Subset", "ConcatDataset"}
_LOSSES = ("loss", "criterion")


@dataclass(frozen=True)
class Candidate:
    """A class or function that could stand in a job file.

    Attributes:
        kind: As what.
        name: Its name in the module.
        node: Its definition.
        required: Arguments that it has no default for, in order.
        defaults: Numbers that its arguments have as defaults.
    """

    kind: Kind
    name: str
    node: ast.ClassDef | ast.FunctionDef
    required: tuple[str, ...]
    defaults: dict[str, int | float]


def candidates(text: str) -> list[Candidate]:
    """Return what a module defines, in its order; private names and what is only built upon by others are last.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: list[Candidate] = []
    models: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            kind = _kind_of_class(node, models)
            if kind == "model":
                models.add(node.name)
            if kind is not None:
                found.append(_candidate(kind, node, classes))
        elif isinstance(node, ast.FunctionDef) and (kind_of := _kind_of_function(node, models)) is not None:
            found.append(_candidate(kind_of, node, classes))
    used = _used_by_others(found)
    return sorted(found, key=lambda each: (each.name.startswith("_"), each.name in used))


def _kind_of_class(node: ast.ClassDef, models: set[str]) -> Kind | None:
    bases = [dotted for base in node.bases if (dotted := dotted_names(base))]
    last = {dotted[-1] for dotted in bases}
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    is_module = any(name.endswith("Module") for name in last) or bool(last & models)
    if is_module or any(d[-1] in _OF_TORCH_NN and "nn" in d[:-1] for d in bases):
        # A loss as a module (`class Focal(nn.Module): def forward(self, outputs, targets)`) is no model.
        return None if node.name.lower().endswith(_LOSSES) else "model"
    if last & _DATASETS or {"__len__", "__getitem__"} <= methods:
        return "dataset" if last & {"TensorDataset"} or "__getitem__" in methods else None
    return None


def _kind_of_function(node: ast.FunctionDef, models: set[str]) -> Kind | None:
    returned = dotted_names(node.returns) if node.returns is not None else []
    name = node.name.lower()
    places = [each.arg for each in node.args.args]
    if returned and (returned[-1] == "Module" or returned[-1] in models):
        return "model"
    if name in {"training_step", "train_step"} and len(places) == 2:
        return "step"
    if name.endswith(_LOSSES) and len(places) >= 2:
        return "loss"
    if returned and (returned[-1] in _DATASETS or returned[-1].endswith("Dataset")):
        return "dataset"
    returns = any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node))
    is_named_so = "dataset" in name or name in {"data", "load_data", "make_data", "train_data"}
    return "dataset" if is_named_so and returns else None


def _candidate(
    kind: Kind, node: ast.ClassDef | ast.FunctionDef, classes: dict[str, ast.ClassDef]
) -> Candidate:
    function = node if isinstance(node, ast.FunctionDef) else _constructor(node, classes, set())
    if function is None:
        return Candidate(kind, node.name, node, (), {})
    arguments = function.args
    places = [*arguments.posonlyargs, *arguments.args][int(isinstance(node, ast.ClassDef)) :]
    defaults: list[ast.expr | None] = [*[None] * (len(places) - len(arguments.defaults)), *arguments.defaults]
    pairs = [
        *zip(places, defaults, strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    numbers = {
        each.arg: default.value
        for each, default in pairs
        if isinstance(default, ast.Constant) and isinstance(default.value, int | float)
    }
    required = tuple(each.arg for each, default in pairs if default is None)
    return Candidate(kind, node.name, node, () if kind in {"loss", "step"} else required, numbers)


def _constructor(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], seen: set[str]
) -> ast.FunctionDef | None:
    """Return the class's `__init__`, or that of a base in the same file."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return each
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    bases = [classes[name] for name in names if name in classes and name not in seen]
    return _constructor(bases[0], classes, {*seen, *names}) if bases else None


def _used_by_others(found: list[Candidate]) -> set[str]:
    """Return the names of models that others here call: parts, not the whole."""
    names = {each.name for each in found if each.kind == "model"}
    return {
        inner.id
        for each in found
        if each.kind == "model"
        for inner in ast.walk(each.node)
        if isinstance(inner, ast.Name) and inner.id in names - {each.name}
    }
