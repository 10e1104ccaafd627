"""Random generators that a dataset draws from beside the global ones: a library's, which are seeded, and its own."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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
    seen = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}  # noqa: SLF001
    waiting = deque(("dataset" if not n else f"collate{n}", root, False) for n, root in enumerate(roots))
    # An id stands for one object only as long as the object lives.
    kept: list[Any] = []
    found = []
    while waiting and len(kept) < _MOST_OBJECTS:
        path, thing, is_of_library = waiting.popleft()
        if thing is None or id(thing) in seen or isinstance(thing, _DATA):
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, GENERATORS):
            found.append(Held(path, thing, is_of_library))
            continue
        is_container = isinstance(thing, dict | list | tuple | deque)
        is_of_library = _root_of(type(thing)) in LIBRARIES or (is_of_library and is_container)
        waiting.extend((f"{path}{name}", value, is_of_library) for name, value in _inside(thing))
    return found


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    # imgaug's Sequential is a list.
    if isinstance(thing, dict):
        items = list(zip(range(_MOST_ITEMS), list(thing.items()), strict=False))
        yield from (
            (f"[{key!r}]" if isinstance(key, str | int) else "[..]", item) for _, (key, item) in items
        )
    elif isinstance(thing, list | tuple | deque):
        yield from ((f"[{n}]", value) for n, value in zip(range(_MOST_ITEMS), thing, strict=False))
    if isinstance(thing, functools.partial):
        yield from (("", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, MethodType):
        yield from (("", thing.__self__), ("", thing.__func__))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    else:
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
        yield from _of_methods(type(thing))


def _root_of(named: Any) -> str:
    return str(named.__module__ or "").partition(".")[0]


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if _root_of(function) in _NOT_FOLLOWED:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # nothing was assigned yet
            continue
    yield from ((f".{name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from ((f".default{n}", value) for n, value in enumerate(function.__defaults__ or ()))
    for name in _names_of(function.__code__):
        if name in function.__globals__:
            yield f":{name}", function.__globals__[name]


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _of_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that the methods of a class and of its base classes refer to."""
    for base in kind.__mro__:
        for value in vars(base).values():
            if isinstance(value, FunctionType):
                yield from _of_function(value)
