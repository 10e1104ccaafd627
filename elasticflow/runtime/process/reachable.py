"""State that training may have left in an object: every tensor, number and random generator reachable from the object.

The walk follows attributes, slots, items of containers, the closure and defaults of a function, the parts of a
`functools.partial` and the object of a bound method. It does not follow modules, classes, threads, and the machinery of
torch and elasticflow. Each object is visited once, under the shortest path that leads to it.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import random
from collections import deque
from collections.abc import Mapping
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from elasticflow.runtime.process import torch_private
from elasticflow.runtime.process.random_streams import GENERATORS
from elasticflow.runtime.process.sharded_tensors import local_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

T = TypeVar("T")

# Objects and numbers at which a walk stops, and items of a container that is not walked: more is data, not state.
_MOST_OBJECTS, _MOST_ITEMS = 200_000, 50_000

_LARGEST_KEY = 2**32
"""Bound for whole numbers as keys of a dict: a larger key is the `id` of an object, and differs between processes."""

_MACHINERY = (
    "elasticflow",
    *torch_private.MACHINERY,
    "torch.distributed",
    "torch.autograd",
    "torch.cuda.streams",
    "torch.fx",
    "torch.profiler",
    "torch.utils.hooks",
    "_thread",
    "asyncio",
    "concurrent",
    "logging",
    "multiprocessing",
    "threading",
    "weakref",
)
_OPAQUE = (
    type,
    ModuleType,
    CodeType,
    BuiltinFunctionType,
    GeneratorType,
    str,
    bytes,
    bytearray,
    memoryview,
    torch.dtype,
    torch.device,
    torch.Size,
)
_COMMON = (int, float)
_NUMBERS = (Number, itertools.count)
_VALUES = (Tensor, np.ndarray, *GENERATORS)
_LEAVES = (*_COMMON, Number, *_VALUES)


class Leaf(NamedTuple):
    """A value that a walk has reached.

    Attributes:
        path: Path from the root: `optimizer.gen_adam.state['head.weight']['exp_avg']`.
        value: A tensor (of a sharded one the local part), array, number (never a bool) or random generator.
    """

    path: str
    value: Any


def leaves(
    roots: Mapping[str, Any],
    names: Mapping[int, str],
    outside: Collection[int] = (),
    deepest: int | None = None,
) -> Iterator[Leaf]:
    """Yield the values reachable from *roots*, the nearest first.

    Args:
        roots: Objects, by the name that their paths begin with. A value that two roots share has the path from the first.
        names: Names of the model's parameters, by `id`: a path uses them where parameters are keys.
        outside: `id` of objects that are neither followed nor yielded.
        deepest: Largest number of objects between a root and a yielded value; None: no limit.
    """

    def enters(thing: Any, depth: int) -> bool:
        is_closed = isinstance(thing, (*_VALUES, *_OPAQUE)) or is_machinery(thing) or _is_data(thing)
        return depth != deepest and not is_closed

    for path, thing, _ in objects(roots, enters, outside, names):
        if isinstance(thing, itertools.count):
            # `repr` gives `count(3)`, and does not advance it.
            yield Leaf(path, ast.literal_eval(repr(thing)[len("count(") : -1].split(",")[0]))
        elif isinstance(thing, _LEAVES):
            yield Leaf(path, local_of(thing) if isinstance(thing, Tensor) else thing)


def objects(
    roots: Mapping[str, Any],
    enters: Callable[[Any, int], bool],
    outside: Collection[int] = (),
    names: Mapping[int, str] | None = None,
) -> Iterator[tuple[str, Any, int]]:
    """Yield the objects reachable from *roots*, the nearest first, each with its path and depth; numbers each time, others once.

    Args:
        enters: Tells whether to go into an object at a depth, once it was yielded.
    """
    seen = set(outside) | shared_generators()
    waiting = deque((path, thing, 0) for path, thing in roots.items())
    # An id stands for one object only as long as the object lives.
    kept: list[Any] = []
    for _ in range(_MOST_OBJECTS):
        if not waiting:
            return
        path, thing, depth = waiting.popleft()
        if thing is None or isinstance(thing, bool | random.SystemRandom):  # the latter has no state
            continue
        if type(thing) in _COMMON or isinstance(thing, _NUMBERS):
            yield path, thing, depth
            continue
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield path, thing, depth
        if enters(thing, depth):
            waiting.extend((inner, each, depth + 1) for inner, each in inside_of(path, thing, names or {}))


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class wherever this process holds them; slow: looks at every object that the collector knows."""
    # Not isinstance: it asks each object for its class, and torch's deprecated ones warn then.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def shared_generators() -> set[int]:
    """Return the `id` of the generators that are seeded anew for each step: their state does not outlive a step."""
    shared = [random._inst, torch.default_generator, np.random.mtrand._rand]  # noqa: SLF001
    return {id(generator) for generator in shared}


def is_machinery(thing: Any) -> bool:
    """True if *thing* belongs to torch's or elasticflow's machinery, or to a library that holds no state of training."""
    module = thing.__module__ if isinstance(thing, FunctionType) else type(thing).__module__
    return (module or "").startswith(_MACHINERY)


def _is_data(thing: Any) -> bool:
    return isinstance(thing, Mapping | list | tuple | deque) and len(thing) > _MOST_ITEMS


def inside_of(path: str, thing: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that *thing* holds, with their paths; *names* as in `leaves`."""
    if isinstance(thing, Mapping):
        is_by_handle = path.endswith("_hooks")  # torch numbers hooks across the whole process
        for number, (key, value) in enumerate(list(thing.items())):
            yield f"{path}[{f'#{number}' if is_by_handle else _label(key, number, names)}]", value
    elif isinstance(thing, list | tuple | deque):
        fields = getattr(thing, "_fields", None)
        for number, value in enumerate(list(thing)):
            yield f"{path}.{fields[number]}" if fields else f"{path}[{number}]", value
    elif isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield f"{path}.args", thing.args
        yield f"{path}.keywords", thing.keywords
    elif isinstance(thing, FunctionType):
        yield from _held_by_function(path, thing)
    elif isinstance(thing, MethodType):
        yield path, thing.__self__
        yield path, thing.__func__
    else:
        for name, value in _attributes(thing):
            yield f"{path}.{name}", value


def _held_by_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.{name}", cell.cell_contents
        except ValueError:
            continue  # nothing was assigned yet
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"{path}.__defaults__[{number}]", value
    for name, value in {**(function.__kwdefaults__ or {}), **vars(function)}.items():
        yield f"{path}.{name}", value


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            try:
                yield name, getattr(thing, mangled)
            except AttributeError:
                continue


def _label(key: Any, number: int, names: Mapping[int, str]) -> str:
    name = names.get(id(key))
    if name is None and isinstance(key, int):
        name = names.get(key)
    if name is not None:
        return repr(name)
    if isinstance(key, str | bool | float | None) or (isinstance(key, int) and key < _LARGEST_KEY):
        return repr(key)
    return f"#{number}"
