"""Finds the kind of object that an entry point makes, by its bases or return annotation: a model, a dataset ....

Reads source only; reports nothing if the source does not show the kind.
"""

from __future__ import annotations

import ast
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.bindings import origin, parse_python
from elasticflow.python_source.classes import base_names, classes_of, methods_of
from elasticflow.python_source.modules import CannotTellError, Definition, UnresolvedError, source_of
from elasticflow.python_source.syntax import dotted_names, unquoted

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.python_source.modules import Module
    from elasticflow.python_source.resolve import Resolver


class Kind(NamedTuple):
    """A kind of object.

    Attributes:
        base: The class of torch that all objects of the kind inherit from.
    """

    words: str
    base: str


MODEL = Kind("a model", "torch.nn.Module")
OPTIMIZER = Kind("an optimizer", "torch.optim.Optimizer")
SCHEDULE = Kind("a schedule", "torch.optim.lr_scheduler.LRScheduler")
DATASET = Kind("a dataset", "torch.utils.data.Dataset")
LOADER = Kind("a loader", "torch.utils.data.DataLoader")

_WANTED: dict[KeyPath, Kind] = {
    ("model", "entry"): MODEL,
    ("optimizer", "entry"): OPTIMIZER,
    ("lr_scheduler", "entry"): SCHEDULE,
    ("dataset", "entry"): DATASET,
    ("evaluation", "entry"): DATASET,
}
# By the module that defines the base in torch's source, and by its import name if torch is not installed.
_BASES = {
    "torch.nn.modules.module.Module": MODEL, "torch.nn.Module": MODEL,
    "torch.optim.optimizer.Optimizer": OPTIMIZER, "torch.optim.Optimizer": OPTIMIZER,
    "torch.optim.lr_scheduler.LRScheduler": SCHEDULE,
    "torch.utils.data.dataset.Dataset": DATASET, "torch.utils.data.Dataset": DATASET, "torch.utils.data.IterableDataset": DATASET,
    "torch.utils.data.dataloader.DataLoader": LOADER, "torch.utils.data.DataLoader": LOADER,
}  # fmt: skip
# Modules whose classes all belong to the kind.
_HOMES = {
    OPTIMIZER: tuple(
        f"torch.optim.{each}" for each in ("adam", "adamw", "sgd", "rmsprop", "adagrad", "nadam", "radam")
    ),
    SCHEDULE: ("torch.optim.lr_scheduler",),
    MODEL: (),
    DATASET: (),
}


class WrongKind(NamedTuple):
    """An entry point makes an object of another kind than its key needs.

    Attributes:
        found: The kind of object that the entry point makes, in words.
        beside: Classes of the wanted kind beside the entry point.
        is_loader: The object yields batches, not samples.
    """

    found: str
    wanted: Kind
    beside: list[str]
    is_loader: bool = False


def wrong_kind(path: KeyPath, definition: Definition, resolver: Resolver) -> WrongKind | None:
    """Return the wrong kind that the entry point of a key makes; None unless it is certainly wrong."""
    wanted = _WANTED.get(path)
    if wanted is None:
        return None
    if definition.module.name in _HOMES[wanted]:
        return None  # the usual case, and torch's bases take milliseconds to read
    kinds = kinds_made(definition, resolver)
    if wanted in kinds:
        return None
    if kinds:
        first = min(kinds)
        what = "is" if isinstance(definition.node, ast.ClassDef) else "returns"
        beside = classes_beside(definition, wanted, resolver)
        return WrongKind(f"{what} {first.words} ({first.base})", wanted, beside, first is LOADER)
    if wanted is MODEL and _is_plain(definition):
        return WrongKind("is a class without a base", wanted, classes_beside(definition, wanted, resolver))
    return None


def _is_plain(definition: Definition) -> bool:
    """Return whether a class has no base, no metaclass and no decorator, and makes no objects of other classes."""
    node = definition.node
    is_class = isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list)
    return is_class and not methods_of(definition) & {"__new__"}


def kinds_made(definition: Definition, resolver: Resolver) -> set[Kind]:
    """Return the kinds of object that a class or function makes; empty if reading does not show them."""
    is_class = isinstance(definition.node, ast.ClassDef)
    return _kinds(definition, resolver) if is_class else _returned(definition, resolver)


def _kinds(definition: Definition, resolver: Resolver) -> set[Kind]:
    """Return the kinds of a class, by all its bases that can be read."""
    kinds: set[Kind] = set()
    if not isinstance(definition.node, ast.ClassDef):
        return kinds
    owners = classes_of(definition, resolver, is_left_out=_BASES.__contains__, skips_unreadable=True)
    with contextlib.suppress(CannotTellError):  # no order of the bases
        for owner in owners:
            names = [f"{owner.module.name}.{getattr(owner.node, 'name', '')}", *base_names(owner)]
            kinds |= {_BASES[name] for name in names if name in _BASES}
    return kinds


def _kinds_of_name(module: Module, name: ast.expr, resolver: Resolver) -> set[Kind]:
    kind = _BASES.get(origin(module, name))
    names = dotted_names(name)
    if kind or not names:
        return {kind} if kind else set()
    try:
        resolved = resolver.dotted(module, names)
    except (UnresolvedError, RecursionError):
        return set()
    return _kinds(resolved, resolver) if isinstance(resolved, Definition) else set()


def _returned(definition: Definition, resolver: Resolver) -> set[Kind]:
    """Return the kinds of a function's result, by its annotation, or by the class it calls in its only return."""
    node = definition.node
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return set()
    name = node.returns
    if name is None:
        returns = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
        value = returns[0].value if len(returns) == 1 else None
        name = value.func if isinstance(value, ast.Call) else None
    name = None if name is None else unquoted(name)
    return set() if name is None else _kinds_of_name(definition.module, name, resolver)


def classes_beside(definition: Definition, wanted: Kind, resolver: Resolver) -> list[str]:
    """Return the classes of a kind in the same module, if it is one of the job."""
    module = definition.module
    if not module.is_own:
        return []
    classes = [each for each in parse_python(source_of(module)) if isinstance(each, ast.ClassDef)]
    return [each.name for each in classes if wanted in _kinds(Definition(module, each), resolver)]
