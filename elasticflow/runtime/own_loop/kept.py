"""The script's objects as what a snapshot holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import StateError
from elasticflow.runtime.own_loop import values
from elasticflow.runtime.process.torch_private import COMPILED_MODEL

if TYPE_CHECKING:
    from elasticflow.runtime.state.state import State

_PARTS = {
    "model",
    "optimizer",
    "optimizers",
    "scheduler",
    "scaler",
    "ema",
    "evaluation",
    "include",
}  # of `State`
_NO_MODEL = "run.keep(model=model, optimizer=optimizer): the model is what a run goes on with"
_WHICH_MODEL = "call one of them model, run.keep(model={}, ...), and the others as you like"


_INCLUDED = "include."
_FABRIC_MODULE = "_FabricModule"
"""Name of the class in which Lightning Fabric wraps a model (lightning_fabric 2.6, `wrappers.py`)."""


def bare(model: nn.Module) -> nn.Module:
    """Return the model itself, out of DistributedDataParallel, torch.compile and Lightning Fabric."""
    while True:
        inside = getattr(model, COMPILED_MODEL, None)
        if isinstance(model, DistributedDataParallel | DataParallel) or _is_called(model, _FABRIC_MODULE):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def is_wrapped(model: nn.Module) -> bool:
    """Whether the script has wrapped *model* in DistributedDataParallel itself; takes a while: it looks at every object there is."""
    wrappers = (each for each in gc.get_objects() if isinstance(each, DistributedDataParallel))
    return any(bare(wrapper) is model or model in wrapper.modules() for wrapper in wrappers)


def parts_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a snapshot is to hold, as `State` is given it: by class, whatever the names are.

    The model is what is called `model`, or the only one. Plain values and generators are included as they are.

    Raises:
        StateError: there is no model or no optimizer, or a snapshot cannot hold a value.
    """
    left = {name: inside(value) for name, value in objects.items()}
    averages = _taken(left, AveragedModel)
    models = {name: value for name, value in left.items() if isinstance(value, nn.Module)}
    if "model" not in models and len(models) != 1:
        names = ", ".join(models) or "none"
        help_ = _NO_MODEL if not models else _WHICH_MODEL.format(next(iter(models)))
        raise StateError(f"run.keep was given {names}: no model called `model`", help_)
    model = left.pop("model" if "model" in models else next(iter(models)))
    optimizers = _taken(left, Optimizer)
    if not optimizers:
        raise _no_optimizer(left)
    schedules = _taken(left, LRScheduler)
    scalers: dict[str, Any] = {name: left.pop(name) for name in list(left) if is_scaler(left[name])}
    (average, *_), (scaler, *_) = [*averages.values(), None], [*scalers.values(), None]
    return {
        "model": model,
        "optimizer": _only(optimizers),
        "optimizers": optimizers if len(optimizers) > 1 else None,
        "scheduler": _only(schedules) if len(schedules) < 2 else None,
        "scaler": scaler,
        "ema": average,
        "include": {
            **_plain_wrapped(left),
            **(schedules if len(schedules) > 1 else {}),
            **dict(list(averages.items())[1:]),
        },
    }


def _no_optimizer(objects: Mapping[str, Any]) -> StateError:
    """Return the error that no torch optimizer was given; an object of *objects* that has one inside is named."""
    for name, value in objects.items():
        for attribute, held in getattr(value, "__dict__", {}).items():
            if isinstance(held, Optimizer):
                return StateError(
                    f"run.keep was given no optimizer: {name} is a {type(value).__qualname__}, which is none of torch.optim",
                    f"run.keep(optimizer={name}.{attribute}), and what else {name} counts by a name of its own (guide own-loop.md, "
                    f"Values that the script keeps)",
                )
    return StateError("run.keep was given no optimizer", _NO_MODEL)


def parts_by_name(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a snapshot is to hold of an entry point that the compiler wrote: each part has its name; others are included."""
    parts = {name: value for name, value in objects.items() if name in _PARTS}
    others = {name: value for name, value in objects.items() if name not in _PARTS}
    return {**parts, "include": {**parts.get("include", {}), **_plain_wrapped(others)}}


def values_of(state: State) -> values.KeptValues:
    """Return the plain values that *state* holds, for the script to read and write."""
    return values.KeptValues(
        {
            name.removeprefix(_INCLUDED): value
            for name, value in state.objects.items()
            if isinstance(value, values.Value)
        }
    )


def _plain_wrapped(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values.part_of(name, value) for name, value in objects.items()}


def own_objects(state: State) -> list[str]:
    """Return the names of the script's own objects that are kept, a loader's for instance; plain values left out."""
    return [
        name.removeprefix(_INCLUDED)
        for name, value in state.objects.items()
        if name.startswith(_INCLUDED) and not isinstance(value, values.Value)
    ]


def has_loader(state: State) -> bool:
    """Return True if one of `own_objects` can be iterated over, so that its state may be a place in the data."""
    objects = [state.objects[f"{_INCLUDED}{name}"] for name in own_objects(state)]
    return any(hasattr(value, "__iter__") and not isinstance(value, nn.Module) for value in objects)


def inside(value: Any) -> Any:
    """Return what a library has wrapped: a model, an optimizer (Accelerate's and Fabric's have one), a schedule (Accelerate's)."""
    if isinstance(value, nn.Module):
        return bare(value)
    if isinstance(value, Optimizer):
        inner = getattr(value, "optimizer", None)
        return inside(inner) if isinstance(inner, Optimizer) else value
    schedule = getattr(value, "__dict__", {}).get("scheduler")
    return schedule if isinstance(schedule, LRScheduler) else value


def _taken(objects: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take those of a class out of *objects*; also those in a list or mapping of nothing else."""
    taken: dict[str, Any] = {}
    for name, value in list(objects.items()):
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        members = list(inner)
        if isinstance(value, kind):
            taken[name] = objects.pop(name)
        elif members and all(isinstance(member, kind) for member in members):
            names = map(str, value if isinstance(value, Mapping) else range(len(members)))
            taken |= {f"{name}_{key}": member for key, member in zip(names, members, strict=True)}
            del objects[name]
    return taken


def is_scaler(value: Any) -> bool:
    """Return whether *value* is a gradient scaler, of torch or derived from it."""
    return _is_called(value, "GradScaler")


def _is_called(value: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(value).__mro__)


def _only(objects: Mapping[str, Any]) -> Any:
    return next(iter(objects.values())) if len(objects) == 1 else None
