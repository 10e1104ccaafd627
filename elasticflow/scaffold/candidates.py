"""The model, dataset, loss and training step that a job could name, found by reading a file and its neighbours."""

from __future__ import annotations

import ast
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.entry_points.required_methods import why_not_map_style
from elasticflow.jobfile.type_checks.makes import DATASET, MODEL, kinds_made
from elasticflow.python_source.bindings import parse_python
from elasticflow.python_source.classes import base_names, methods_of
from elasticflow.python_source.modules import (
    Definition,
    Finder,
    MethodError,
    UnreadableModuleError,
    UnresolvedError,
    source_of,
)
from elasticflow.python_source.resolve import Resolver
from elasticflow.python_source.syntax import own_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Role = Literal["model", "dataset", "loss", "step"]
ROLES: tuple[Role, ...] = ("model", "dataset", "loss", "step")
_MOST_NEIGHBOURS = 100
_LOSSES = ("loss", "criterion")
_STEPS = {"training_step", "train_step"}
_DATA = {"data", "load_data", "make_data", "train_data"}
# Bases by name, for packages that are not installed here.
_MODEL_BASES = ("Module", "PreTrainedModel")


class ModuleLocation(NamedTuple):
    """A module by the name a job file gives it.

    Attributes:
        path: The folder of `job.path` that contains the module, relative to the project's root.
    """

    module: str
    path: str


@dataclass(frozen=True)
class Candidate:
    """A class or function that could stand in a job file.

    Attributes:
        entry: `module:name`.
        is_part: Another model of the file uses it, or its name is private.
        is_beside: It stands in a file beside the model's file.
    """

    role: Role
    entry: str
    definition: Definition
    is_part: bool = False
    is_beside: bool = False

    @property
    def name(self) -> str:
        """Name of the class or function in its module."""
        return self.entry.partition(":")[2]


def locate_module(file: Path, root: Path) -> ModuleLocation:
    """Return how a job under *root* names the module in *file*.

    Raises:
        ScaffoldError: the file lies outside *root*, or its name is no module name.
    """
    try:
        parts = file.resolve().relative_to(root.resolve()).with_suffix("").parts
    except ValueError:
        raise outside(file, root) from None
    if parts[-1] == "__init__":
        parts = parts[:-1]
    # A folder whose name is no identifier is no package: the module path begins below the last such folder.
    begin = max((number + 1 for number, part in enumerate(parts) if not part.isidentifier()), default=0)
    if begin >= len(parts):
        raise ScaffoldError(f"{file} cannot be imported: {file.stem!r} is no module's name", "rename it")
    return ModuleLocation(".".join(parts[begin:]), "/".join(parts[:begin]) or ".")


def outside(file: Path, root: Path) -> ScaffoldError:
    """Return the error for a file outside of the job's project."""
    return ScaffoldError(
        f"{file} lies outside of the project {root}", "write the job file beside it: -o FOLDER/jobs/NAME.toml"
    )


def resolver_of(location: ModuleLocation, root: Path) -> Resolver:
    """Return a resolver for names on the job's path."""
    return Resolver(Finder.of_job(root.resolve(), (location.path,)))


def candidates_in(file: Path, location: ModuleLocation, resolver: Resolver) -> list[Candidate]:
    """Return the candidates in a model's file, then datasets, losses and steps of the files beside it.

    Raises:
        ScaffoldError: the file cannot be read, or is not valid Python.
    """
    if not file.is_file():
        raise ScaffoldError(f"{file} cannot be read: there is no such file", "name a Python file")
    found = _of_module(file, location.module, resolver)
    package = location.module.rpartition(".")[0] if file.name != "__init__.py" else location.module
    for path in sorted(file.parent.glob("*.py"))[:_MOST_NEIGHBOURS]:
        is_other = path.resolve() != file.resolve() and path.stem.isidentifier()
        if is_other and not path.name.startswith(("test_", "conftest", "__")):
            with contextlib.suppress(ScaffoldError):  # not the model's file
                beside = _of_module(path, f"{package}.{path.stem}".lstrip("."), resolver)
                found += [replace(each, is_beside=True) for each in beside if each.role != "model"]
    return found


def _of_module(file: Path, name: str, resolver: Resolver) -> list[Candidate]:
    """Return the candidates of a module in order, with parts of other models last."""
    try:
        module = resolver.finder.find(name)
        text = source_of(module)
    except (UnresolvedError, OSError) as error:
        raise ScaffoldError(f"{file} cannot be read: {error}", "name a Python file") from error
    try:
        statements = parse_python(text)
    except SyntaxError as error:
        raise ScaffoldError(f"not Python of this version: {UnreadableModuleError(module, error)}") from error
    found = []
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definition = Definition(module, node)
            if (role := _role_of(definition, resolver)) is not None:
                found.append(Candidate(role, f"{name}:{node.name}", definition))
    used = _used_by_others(found)
    found = [replace(each, is_part=each.name in used or each.name.startswith("_")) for each in found]
    return sorted(found, key=lambda each: each.is_part)


def _role_of(definition: Definition, resolver: Resolver) -> Role | None:
    kinds = kinds_made(definition, resolver)
    if isinstance(definition.node, ast.ClassDef):
        name = definition.node.name.lower()
        if MODEL in kinds or _has_model_base(definition):
            # A loss as a module (`class Focal(nn.Module): def forward(self, outputs, targets)`) is no model.
            return None if name.endswith(_LOSSES) else "model"
        is_dataset = DATASET in kinds or {"__len__", "__getitem__"} <= methods_of(definition)
        return "dataset" if is_dataset and _is_map_style(definition, resolver) else None
    assert isinstance(definition.node, ast.FunctionDef)
    return "model" if MODEL in kinds else _role_of_function(definition.node, makes_dataset=DATASET in kinds)


def _has_model_base(definition: Definition) -> bool:
    for base in base_names(definition):
        last = base.rpartition(".")[2]
        if last.endswith(_MODEL_BASES) and not last.endswith("DataModule"):
            return True
        if base.startswith("torch.nn.") and base.count(".") == 2 and last != "Parameter":
            return True
    return False


def _is_map_style(definition: Definition, resolver: Resolver) -> bool:
    try:
        return why_not_map_style(definition, resolver) is None
    except UnresolvedError:
        return True


def _role_of_function(node: ast.FunctionDef, *, makes_dataset: bool) -> Role | None:
    name, num_places = node.name.lower(), len(node.args.args)
    num_required = num_places - len(node.args.defaults)
    if name in _STEPS and num_places == 2:
        return "step"
    if "loss" in name.split("_") or name.endswith(_LOSSES):
        return "loss" if num_places >= 2 and num_required <= 2 else None
    returns = any(isinstance(each, ast.Return) and each.value is not None for each in own_nodes(node))
    is_named_so = "dataset" in name or name in _DATA
    return "dataset" if makes_dataset or (is_named_so and returns) else None


def _used_by_others(candidates: Iterable[Candidate]) -> set[str]:
    models = [each for each in candidates if each.role == "model"]
    names = {each.name for each in models}
    return {
        inner.id
        for each in models
        for inner in ast.walk(each.definition.node)
        if isinstance(inner, ast.Name) and inner.id in names - {each.name}
    }


def method_of(entry: str, name: str, resolver: Resolver) -> Definition | None:
    """Return a plain method of the class that an entry point names, its own or inherited."""
    try:
        resolver.entry(f"{entry}.{name}")
    except MethodError as error:
        return error.definition
    except (UnresolvedError, RecursionError):
        pass
    return None


def wholes(candidates: Sequence[Candidate], role: Role) -> list[Candidate]:
    """Return the candidates for a role, without parts of others; from the model's own file if it has any."""
    fitting = [each for each in candidates if each.role == role]
    fitting = [each for each in fitting if not each.is_beside] or fitting
    return [each for each in fitting if not each.is_part] or fitting
