"""The script's objects as what a snapshot holds, and those that it would leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import StateError
from elasticflow.runtime.torch_private import COMPILED_MODEL

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
_METHODS = ("state_dict", "load_state_dict")
_NO_MODEL = "run.keep(model=model, optimizer=optimizer): the model is what a run goes on with"


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


def parts_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a snapshot is to hold, as `State` is given it: models, optimizers, schedules, a gradient scaler, and whatever has a state.

    What an object is tells its class, not its name. The model is what is called `model`, or the only one.

    Raises:
        StateError: there is no model or no optimizer, or something has no `state_dict` and `load_state_dict`.
    """
    left = {name: _inside(value) for name, value in objects.items()}
    averages = _taken(left, AveragedModel)
    models = {name: value for name, value in left.items() if isinstance(value, nn.Module)}
    if "model" not in models and len(models) != 1:
        names = ", ".join(models) or "none"
        raise StateError(f"run.keep was given {names}: no model called `model`", _NO_MODEL)
    model = left.pop("model" if "model" in models else next(iter(models)))
    optimizers = _taken(left, Optimizer)
    if not optimizers:
        raise StateError("run.keep was given no optimizer", _NO_MODEL)
    schedules = _taken(left, LRScheduler)
    scalers: dict[str, Any] = {name: left.pop(name) for name in list(left) if _is_scaler(left[name])}
    (average, *_), (scaler, *_) = [*averages.values(), None], [*scalers.values(), None]
    return {
        "model": model,
        "optimizer": _only(optimizers),
        "optimizers": optimizers if len(optimizers) > 1 else None,
        "scheduler": _only(schedules) if len(schedules) < 2 else None,
        "scaler": scaler,
        "ema": average,
        "include": {**left, **(schedules if len(schedules) > 1 else {}), **dict(list(averages.items())[1:])},
    }


def parts_by_name(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a snapshot is to hold of an entry point that the compiler wrote: each part has its name; others are included."""
    parts = {name: value for name, value in objects.items() if name in _PARTS}
    others = {name: value for name, value in objects.items() if name not in _PARTS}
    return {**parts, "include": {**parts.get("include", {}), **others}}


def own_objects(state: State) -> list[str]:
    """Return the names of what is kept beside models, optimizers and what belongs to them: a loader's, for instance."""
    return [name.removeprefix(_INCLUDED) for name in state.objects if name.startswith(_INCLUDED)]


def left_out(state: State, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the script's own variables that have a state which no snapshot would hold: class by name.

    Parts of what is kept are none, such as a layer of the model.
    """
    kept = {id(value) for value in state.objects.values()}
    for value in state.objects.values():
        if isinstance(value, nn.Module):
            kept |= {id(module) for module in value.modules()}
    return {
        name: f"{type(value).__module__}.{type(value).__qualname__}"
        for name, value in variables.items()
        if not name.startswith("_") and _has_state(value) and not ({id(value), id(_inside(value))} & kept)
    }


def _has_state(value: Any) -> bool:
    if isinstance(value, type) or not isinstance(getattr(value, "__class__", None), type):
        return False
    if isinstance(value, nn.Module) and not any(True for _ in value.parameters()):
        return False  # a loss function
    if not all(callable(getattr(value, method, None)) for method in _METHODS):
        return False
    try:
        return bool(value.state_dict())  # of a GradScaler that is switched off there is none
    except AttributeError:
        return False  # a wrapper of what has none: Accelerate's DataLoader (1.15)
    except Exception:  # noqa: BLE001  # whatever the script's own object raises: it is only looked for
        return True


def _inside(value: Any) -> Any:
    """Return what a library has wrapped: a model, an optimizer (Accelerate's and Fabric's have one), a schedule (Accelerate's)."""
    if isinstance(value, nn.Module):
        return bare(value)
    if isinstance(value, Optimizer):
        inside = getattr(value, "optimizer", None)
        return _inside(inside) if isinstance(inside, Optimizer) else value
    inside = getattr(value, "scheduler", None)
    return inside if isinstance(inside, LRScheduler) else value


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


def _is_scaler(value: Any) -> bool:
    return _is_called(value, "GradScaler")


def _is_called(value: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(value).__mro__)


def _only(objects: Mapping[str, Any]) -> Any:
    return next(iter(objects.values())) if len(objects) == 1 else None
