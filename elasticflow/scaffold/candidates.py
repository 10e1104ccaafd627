"""What in a source file could be the model, the data, the loss of a job; found by reading."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from elasticflow.python_source.bindings import origin_in
from elasticflow.python_source.syntax import dotted_names, own_nodes
from elasticflow.scaffold.arguments import Argument, Config, arguments_of, config_of, inherited_in_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Role = Literal["model", "dataset", "loss", "step"]
_DATASETS = {"Dataset", "TensorDataset", "Subset", "ConcatDataset"}
_LOSSES = ("loss", "criterion")
_NO_MODULES = ("torch.nn.functional", "torch.nn.init", "torch.nn.utils", "torch.nn.Parameter")
_MODULES = ("Module", "PreTrainedModel", "Model")
_OF_A_PAIR = re.compile("generator|discriminator|critic", re.IGNORECASE)
_MODULES_OF = ("torch.nn.", "timm.", "transformers.", "torchvision.models.")


@dataclass(frozen=True)
class Candidate:
    """A class or function that could stand in a job file.

    Attributes:
        role: As what.
        name: Its name in the module.
        node: Its definition.
        arguments: What it takes, in order.
        is_part: Other models of the file are made of it.
        made: The class that a model is of: of a function, the one of the same file that it returns.
        classes: The classes of the file, by name.
        configs: The dataclasses of the file, by name.
    """

    role: Role
    name: str
    node: ast.ClassDef | ast.FunctionDef
    arguments: tuple[Argument, ...] = ()
    is_part: bool = False
    made: ast.ClassDef | None = None
    classes: Mapping[str, ast.ClassDef] = field(default_factory=dict, repr=False)
    configs: Mapping[str, Config] = field(default_factory=dict, repr=False)

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arguments that it has no default for, in order."""
        return tuple(each.name for each in self.arguments if each.is_required)

    @property
    def defaults(self) -> dict[str, int | float]:
        """Numbers that its arguments have as defaults."""
        defaults = {each.name: each.default for each in self.arguments}
        return {name: value for name, value in defaults.items() if isinstance(value, int | float)}

    @property
    def needs_objects(self) -> tuple[str, ...]:
        """Names of the arguments that it has no default for and that a job file cannot give."""
        return tuple(each.name for each in self.arguments if each.is_required and each.takes.is_object)


def candidates(text: str, is_model: Callable[[str], bool] = lambda _: False) -> list[Candidate]:
    """Return what a module defines that a job could name, in its order; private names and parts of other models last.

    Args:
        text: The module's source.
        is_model: Tells of a class, by its name, whether a base in another file makes it a model.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    return _File(ast.parse(text), text, is_model).candidates()


def candidates_named(text: str, name: str, role: Role) -> Candidate | None:
    """Return the class or function *name* of a module as a candidate, whatever it looks like; None if it has none.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    return _File(ast.parse(text), text, lambda _: False).named(name, role)


class _File:
    """The definitions of one source."""

    def __init__(self, tree: ast.Module, text: str, is_model: Callable[[str], bool]) -> None:
        self._text = text
        self._nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        self._classes = {node.name: node for node in self._nodes if isinstance(node, ast.ClassDef)}
        self._functions = {node.name: node for node in self._nodes if isinstance(node, ast.FunctionDef)}
        self._configs: dict[str, Config] = {}
        for node in self._classes.values():  # a field of one may be an object of one before it
            if (config := config_of(node, text, self._configs, self._classes)) is not None:
                self._configs[node.name] = config
        self._models = self._model_classes(is_model)

    def candidates(self) -> list[Candidate]:
        candidates = [each for node in self._nodes if (each := self._candidate(node)) is not None]
        used = _used_by_others(candidates)
        candidates = [replace(each, is_part=each.name in used) for each in candidates]
        return sorted(
            candidates, key=lambda each: (each.name.startswith("_"), each.is_part, bool(each.needs_objects))
        )

    def named(self, name: str, role: Role) -> Candidate | None:
        node = next((each for each in self._nodes if each.name == name), None)
        return None if node is None else self._made(node, role, None)

    def _made(self, node: ast.ClassDef | ast.FunctionDef, role: Role, made: ast.ClassDef | None) -> Candidate:
        arguments = () if role in {"loss", "step"} else self._arguments(node)
        return Candidate(
            role, node.name, node, arguments, made=made, classes=self._classes, configs=self._configs
        )

    def _model_classes(self, is_model: Callable[[str], bool]) -> set[str]:
        models = {
            name
            for name, node in self._classes.items()
            if any(self._has_module_base(each) for each in inherited_in_file(node, self._classes))
        }
        return models | {
            name
            for name, node in self._classes.items()
            if name not in models and node.bases and is_model(name)
        }

    def _has_module_base(self, node: ast.ClassDef) -> bool:
        for base in node.bases:
            name = origin_in(self._text, base) or ".".join(dotted_names(base))
            last = name.rpartition(".")[2]
            if last.endswith("DataModule") or name.startswith(_NO_MODULES):
                continue
            if last.endswith(_MODULES[:2]) or (name.startswith(_MODULES_OF) and last[:1].isupper()):
                return True
            # Without the import, as in a notebook's cell: nn.Sequential.
            if "nn" in dotted_names(base)[:-1] and last[:1].isupper():
                return True
        return False

    def _candidate(self, node: ast.ClassDef | ast.FunctionDef) -> Candidate | None:
        made: ast.ClassDef | None
        if isinstance(node, ast.ClassDef):
            role, made = self._role_of_class(node), node
        else:
            role = self._role_of_function(node)
            annotated = sorted(_returned_names(node) & self._models)
            made_by = self._class_made_by(node, set()) or next(iter(annotated), None)
            if role is None and made_by is not None:
                role = "model"
            made = self._classes.get(made_by or "") if role == "model" else None
        if role is None:
            return None
        return self._made(node, role, made if role == "model" else None)

    def _role_of_class(self, node: ast.ClassDef) -> Role | None:
        last = {names[-1] for base in node.bases if (names := dotted_names(base))}
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        if node.name in self._models:
            # A loss as a module (`class Focal(nn.Module): def forward(self, outputs, targets)`) is no model.
            return None if node.name.lower().endswith(_LOSSES) else "model"
        if last & _DATASETS or {"__len__", "__getitem__"} <= methods:
            return "dataset" if last & {"TensorDataset"} or "__getitem__" in methods else None
        return None

    def _role_of_function(self, node: ast.FunctionDef) -> Role | None:
        returned = _returned_names(node)
        name = node.name.lower()
        num_required, num_places = len(node.args.args) - len(node.args.defaults), len(node.args.args)
        if returned & self._models or any(each.endswith("Module") for each in returned):
            return "model"
        if name in {"training_step", "train_step"} and num_places == 2:
            return "step"
        if "loss" in name.split("_") or name.endswith(_LOSSES):
            return "loss" if num_places >= 2 and num_required <= 2 else None
        if any(each in _DATASETS or each.endswith("Dataset") for each in returned):
            return "dataset"
        is_named_so = "dataset" in name or name in {"data", "load_data", "make_data", "train_data"}
        return "dataset" if is_named_so and any(returns_of(node)) else None

    def _class_made_by(self, node: ast.FunctionDef, seen: set[str]) -> str | None:
        """Return the class of the file that a function returns an object of, whatever its annotation says."""
        if node.name in seen:
            return None
        made: dict[str, str] = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                names = dotted_names(each.value.func)[-1:]
                made |= {t.id: names[0] for t in each.targets if isinstance(t, ast.Name) and names}
        classes = set()
        for value in returns_of(node):
            names = dotted_names(value.func) if isinstance(value, ast.Call) else []
            name = made.get(value.id, "") if isinstance(value, ast.Name) else ".".join(names)
            if name in self._functions:
                name = self._class_made_by(self._functions[name], {*seen, node.name}) or ""
            classes.add(name if name in self._models else "")
        return classes.pop() if len(classes) == 1 and "" not in classes else None

    def _arguments(self, node: ast.ClassDef | ast.FunctionDef) -> tuple[Argument, ...]:
        if isinstance(node, ast.FunctionDef):
            return arguments_of(node, self._text, self._configs, skip=0)
        if node.name in self._configs:
            return self._configs[node.name].fields
        function = method_of(node, "__init__", self._classes)
        return () if function is None else arguments_of(function, self._text, self._configs, skip=1)


def trained_together(candidates: Iterable[Candidate]) -> list[str]:
    """Return the names of models that seem to be trained against each other, as a GAN's; empty if none do.

    They are two or more wholes of one file, and one of them is called a generator, a discriminator or a critic.
    """
    names: dict[str, str] = {}
    for each in candidates:
        if each.role == "model" and each.made is not None and not each.is_part and each.name[0] != "_":
            names.setdefault(each.made.name, each.name)
    parts = {part.group().lower() if (part := _OF_A_PAIR.search(name)) else "" for name in names}
    # Several generators and nothing else are variants, of which one is trained.
    return list(names.values()) if len(parts) > 1 else []


def method_of(node: ast.ClassDef, name: str, classes: Mapping[str, ast.ClassDef]) -> ast.FunctionDef | None:
    """Return a class's method, its own or that of a base in the same file."""
    for owner in inherited_in_file(node, classes):
        for each in owner.body:
            if isinstance(each, ast.FunctionDef) and each.name == name:
                return each
    return None


def returns_of(node: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield what a function returns; functions inside it left out."""
    for inner in own_nodes(node):
        if isinstance(inner, ast.Return) and inner.value is not None:
            yield inner.value


def _returned_names(node: ast.FunctionDef) -> set[str]:
    """Return the last names in a function's return annotation: of `nn.Module | None`, `Module` and `None`."""
    if node.returns is None:
        return set()
    texts = [
        e.value for e in ast.walk(node.returns) if isinstance(e, ast.Constant) and isinstance(e.value, str)
    ]
    names_of_types = {
        names[-1] for e in ast.walk(node.returns) if isinstance(e, ast.expr) and (names := dotted_names(e))
    }
    return names_of_types | {text.rpartition(".")[2].strip() for text in texts}


def _used_by_others(candidates: Iterable[Candidate]) -> set[str]:
    """Return the names of models that others here call: parts, not the whole."""
    models = [each for each in candidates if each.role == "model"]
    names = {each.name for each in models}
    return {
        inner.id
        for each in models
        for inner in ast.walk(each.node)
        if isinstance(inner, ast.Name) and inner.id in names - {each.name}
    }
