"""Attributes of modules beside parameters, persistent buffers and submodules, which no `state_dict` holds.

A tensor or a generator that changes with the steps is state, and so is a number that its module both increments and reads.
A value that a module only writes, and a tensor with a graph of the current step, may be state or not.
"""

from __future__ import annotations

import dis
import inspect
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elasticflow.runtime.process import reachable
from elasticflow.runtime.process.torch_private import buffers_of, unsaved_buffers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Torch's own attributes, in every module.
_OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}
# The parameters from which weight_norm, spectral_norm and pruning (torch.nn.utils) make `weight` at each forward.
_MADE_OF = ("_orig", "_g")
_DEEPEST = 3


@dataclass(frozen=True)
class Attribute:
    """Place of a value.

    Attributes:
        is_itself: The attribute is the value itself, and not an object that holds the value.
        has_graph: The value is a tensor that gradients flow through.
    """

    kind: type
    name: str
    is_itself: bool
    has_graph: bool


def held_by(model: nn.Module, outside: Collection[int]) -> Iterator[tuple[reachable.Leaf, Attribute]]:
    """Yield the values that the model's modules hold and no `state_dict` gives, each with its place.

    Args:
        outside: `id` of objects that are neither followed nor yielded, such as its parameters and persistent buffers.
    """
    places: dict[str, tuple[type, str]] = {}
    roots: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in _attributes(module):
            path = ".".join(filter(None, ("model", prefix, name)))
            if value is not None and not isinstance(value, bool | str):
                roots[path], places[path] = value, (type(module), name)
    for leaf in reachable.leaves(roots, {}, outside, _DEEPEST):
        path = leaf.path
        while path not in places:
            path = path[: max(path.rfind("."), path.rfind("["))]
        has_graph = isinstance(leaf.value, Tensor) and leaf.value.grad_fn is not None
        yield leaf, Attribute(*places[path], leaf.path == path, has_graph)


def flags_of(model: nn.Module) -> dict[str, tuple[bool, type]]:
    """Return the flags that the model's modules hold, each with the class of its module."""
    return {
        ".".join(filter(None, ("model", prefix, name))): (value, type(module))
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool) and name not in _OF_TORCH
    }


def goes_by(kind: type, name: str) -> bool:
    """True if the methods of a class both set an attribute and read it."""
    reads, writes, _ = _uses(kind, name)
    return reads > 0 and writes > 0


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    parameters = vars(module)["_parameters"]
    for name, value in list(vars(module).items()):
        is_made = isinstance(value, Tensor) and any(f"{name}{end}" in parameters for end in _MADE_OF)
        if name not in _OF_TORCH and not is_made:
            yield name, value
    for name in unsaved_buffers_of(module):
        yield name, buffers_of(module).get(name)


def is_doubtful(attribute: Attribute, kind: str) -> bool:
    """True if it is doubtful that steps depend on a value that changes.

    Args:
        kind: Kind of the value's mark: "tensor", "scalar", "generator", "whole" or "number".
    """
    if kind == "generator":
        return False
    if kind in {"tensor", "scalar"} and attribute.has_graph:
        return True
    if not attribute.is_itself:
        return kind != "tensor"
    reads, writes, counts = _uses(attribute.kind, attribute.name)
    if kind in {"tensor", "scalar"}:
        return writes > 0 and reads == 0
    return not counts or reads <= counts


def _uses(kind: type, name: str) -> tuple[int, int, int]:
    """Return how often the methods of a class read an attribute, write it, and compute it from its old value."""
    reads = writes = counts = 0
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for method in vars(base).values():
            function = getattr(method, "__func__", getattr(method, "fget", method))
            if isinstance(function, FunctionType):
                # The function of a decorator, such as `torch.no_grad()`, reads nothing itself.
                function = inspect.unwrap(function)
            if not isinstance(function, FunctionType) or function.__name__ == "__init__":
                continue
            found = _names(function.__code__)[name]
            reads, writes = reads + found["reads"], writes + found["writes"]
            counts += min(found["reads"], found["writes"])
    return reads, writes, counts


def _names(code: CodeType) -> defaultdict[str, Counter[str]]:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in dis.get_instructions(code):
        if each.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            found[each.argval]["reads"] += 1
        elif each.opname == "STORE_ATTR":
            found[each.argval]["writes"] += 1
        elif isinstance(each.argval, CodeType):
            for name, uses in _names(each.argval).items():
                found[name].update(uses)
        elif isinstance(each.argval, str) and each.opname == "LOAD_CONST":
            # A `getattr` may read it.
            found[each.argval]["reads"] += 1
    return found
