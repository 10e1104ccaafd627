"""Random generators that a dataset draws from beside the global ones: a library's, which are seeded, and its own."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elasticflow.runtime.process import reachable
from elasticflow.runtime.process.random_streams import GENERATORS, Held

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES = {"albumentations": "1.4.24, 2.0.8", "imgaug": "0.4.0"}
"""Libraries whose generators are seeded for each sample, by module, with the versions that it was tried with."""

_DATA = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic, torch.Tensor, type, ModuleType)
# Transforms are near the dataset, and among the first items of what holds them.
_MOST_OBJECTS, _MOST_ITEMS = 5_000, 100
_GLOBAL = "imgaug.random"
# Functions whose globals are machinery.
_NOT_FOLLOWED = {"builtins", "torch", "torchvision", "numpy", "elasticflow", *LIBRARIES}


def of_libraries(*roots: Any) -> list[Held]:
    """Return the generators of known libraries that *roots*, a dataset and what makes its batches, draw from.

    Followed are attributes, containers, closures, and the globals that functions name. Nothing is imported.
    """
    if not any(library in sys.modules for library in LIBRARIES):
        return []
    held = [each for each in held_by(*roots) if each.is_of_library]
    if _GLOBAL in sys.modules:
        shared = sys.modules[_GLOBAL].get_global_rng().generator
        held = [each for each in held if each.generator is not shared]
        held.append(Held(_GLOBAL, shared, is_of_library=True))
    return held


def held_by(*roots: Any) -> list[Held]:
    """Return the generators that can be reached from *roots*, nearest first; the global ones are left out."""
    seen = reachable.shared_generators()
    waiting = deque(("dataset" if not n else f"collate{n}", root, False) for n, root in enumerate(roots))
    # An id stands for one object only as long as the object lives.
    kept: list[Any] = []
    found = []
    while waiting and len(kept) < _MOST_OBJECTS:
        path, thing, is_of_library = waiting.popleft()
        if thing is None or id(thing) in seen or isinstance(thing, _DATA) or _is_machinery(thing):
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, GENERATORS):
            found.append(Held(path, thing, is_of_library))
            continue
        is_container = isinstance(thing, dict | list | tuple | deque)
        is_of_library = _root_of(type(thing)) in LIBRARIES or (is_of_library and is_container)
        inside = reachable.inside_of(path, thing, {})
        for inner, value in itertools.islice(inside, _MOST_ITEMS if is_container else None):
            waiting.append((inner, value, is_of_library))
        waiting.extend((f"{path}{name}", value, is_of_library) for name, value in _named_by(thing))
    return found


def _is_machinery(thing: Any) -> bool:
    return isinstance(thing, FunctionType) and _root_of(thing) in _NOT_FOLLOWED


def _root_of(named: Any) -> str:
    return str(named.__module__ or "").partition(".")[0]


def _named_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names; of another object the methods, and the attributes beside the items of a list."""
    if isinstance(thing, FunctionType):
        names = [name for name in _names_of(thing.__code__) if name in thing.__globals__]
        yield from ((f":{name}", thing.__globals__[name]) for name in names)
    elif not isinstance(thing, MethodType | functools.partial):
        if isinstance(thing, Mapping | list | tuple | deque):  # as imgaug's Sequential is
            yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
        methods = (each for base in type(thing).__mro__ for each in vars(base).values())
        yield from (("", each) for each in methods if isinstance(each, FunctionType))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
