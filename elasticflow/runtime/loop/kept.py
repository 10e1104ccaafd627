"""The script's objects as parts of a snapshot: by class or by name, plain values and random generators among them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import StateError
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.torch_private import COMPILED_MODEL
from elasticflow.runtime.state.codec import Encoder
from elasticflow.runtime.training import several_optimizers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.state.state import State

_PLAIN = (type(None), bool, int, float, str, list, tuple, dict, OrderedDict, Counter, Tensor)
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
_NO_MODEL = "run.keep(model=model, optimizer=optimizer): the model is what a run continues with"
_WHICH_MODEL = "call one of them model, run.keep(model={}, ...), and the others as you like"


_INCLUDED = "include."
_FABRIC_MODULE = "_FabricModule"
"""Name of the class in which Lightning Fabric wraps a model (lightning_fabric 2.6, `wrappers.py`)."""


class Value:
    """A plain value as a part of a snapshot: its state is the value itself.

    Raises:
        StateError: a snapshot cannot hold the value; names the part of it.
    """

    def __init__(self, name: str, value: Any) -> None:
        Encoder().encode(value, name)
        self.value = value

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, state: Any) -> None:
        """Restore a value: lists, dicts and tensors stay the same objects, with restored contents."""
        self.value = _restored(self.value, state, {})


class Generator:
    """A random generator as a part of a snapshot."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> Any:
        """Return the generator's state."""
        return random_streams.state_of(self.generator)

    def load_state_dict(self, state: Any) -> None:
        """Resume from *state*.

        Raises:
            ValueError: it is the state of another kind of generator.
        """
        random_streams.set_state_of(self.generator, state)


class KeptValues(MutableMapping[str, Any]):
    """Plain values given to `run.keep`, by their argument names. Snapshots hold the current values."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        """Return the value.

        Raises:
            StateError: `run.keep` was given no such value.
        """
        return self._of(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        """Have the next snapshots hold *value*; the same on every rank.

        Raises:
            StateError: `run.keep` was given no such value, or a snapshot cannot hold *value*.
        """
        kept = self._of(name)
        Encoder().encode(value, name)
        kept.value = value

    def __delitem__(self, name: str) -> NoReturn:
        """Refuse: a kept value cannot be removed."""
        raise StateError(
            f"run.kept[{name!r}] cannot be taken away: snapshots hold it", f"run.kept[{name!r}] = None"
        )

    def __contains__(self, name: object) -> bool:
        """Return True if `run.keep` was given a value of this name."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Count the values."""
        return len(self._values)

    def __repr__(self) -> str:
        """Show them as a dict."""
        return repr({name: kept.value for name, kept in self._values.items()})

    def _of(self, name: str) -> Value:
        if name not in self._values:
            there = ", ".join(self._values) or "none"
            raise StateError(
                f"run.keep was given no plain value called {name!r}; it was given: {there}",
                f"run.keep(..., {name}=0): with the value that it has at the beginning",
            )
        return self._values[name]


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
    """Return the arguments of `State` for *objects*, which are known by their classes, whatever their names are.

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
    for name, optimizer in optimizers.items():
        _require_hooks(name, optimizer)
    schedules = _taken(left, LRScheduler)
    scalers: dict[str, Any] = {name: left.pop(name) for name in list(left) if is_scaler(left[name])}
    # One that is switched off has no state, and none of the attributes of one that is on.
    scalers = {name: scaler for name, scaler in scalers.items() if scaler.is_enabled()}
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
            **dict(list(scalers.items())[1:]),
        },
    }


def _require_hooks(name: str, optimizer: Any) -> None:
    """Raise StateError if no hook tells of the steps of *optimizer*, whose class does not call `Optimizer.__init__`."""
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        kind = type(optimizer).__name__
        raise StateError(
            f"{name}, a {kind}, is an optimizer around another one, and does not call Optimizer.__init__, which makes the hooks that tell "
            "of its steps",
            f"make {kind} no subclass of Optimizer, let its state_dict and load_state_dict hold its own state, and "
            f"run.keep(optimizer={name}.optimizer, {kind.lower()}={name})",
        )


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
    """Return the arguments of `State` for a train.py that the compiler wrote: each part has its name; other objects are included.

    Raises:
        StateError: train.py cannot step the schedule.
    """
    parts = {name: value for name, value in objects.items() if name in _PARTS}
    for name, schedule in several_optimizers.schedules(parts.get("scheduler")).items():
        if schedule is not None:
            several_optimizers.require_callable(schedule, name)
    others = {name: value for name, value in objects.items() if name not in _PARTS}
    return {**parts, "include": {**parts.get("include", {}), **_plain_wrapped(others)}}


def values_of(state: State) -> KeptValues:
    """Return the plain values that *state* holds, for the script to read and write."""
    return KeptValues({name: value for name, value in _included(state).items() if isinstance(value, Value)})


def _plain_wrapped(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part_of(name, value) for name, value in objects.items()}


def own_objects(state: State) -> dict[str, Any]:
    """Return the script's own objects that are kept by their names, a loader for instance; plain values left out."""
    return {name: value for name, value in _included(state).items() if not isinstance(value, Value)}


def holds_more(state: State) -> bool:
    """Return True if more is kept than models, optimizers, schedules and scalers: values, generators, a loader."""
    return any(not isinstance(value, nn.Module | LRScheduler) for value in _included(state).values())


def has_loader(state: State) -> bool:
    """Return True if one of `own_objects` can be iterated over, so that its state may be a place in the data."""
    values = _included(state).values()
    return any(hasattr(value, "__iter__") and not isinstance(value, nn.Module) for value in values)


def _included(state: State) -> dict[str, Any]:
    return {
        name.removeprefix(_INCLUDED): value
        for name, value in state.objects.items()
        if name.startswith(_INCLUDED)
    }


def inside(value: Any) -> Any:
    """Return the object that a library has wrapped: a model, an optimizer (Accelerate's and Fabric's have one), a schedule (Accelerate's).

    An optimizer with a state of its own around another one, as Lookahead, is returned as it is.
    """
    if isinstance(value, nn.Module):
        return bare(value)
    if isinstance(value, Optimizer):
        inner = getattr(value, "optimizer", None)
        is_wrapped = isinstance(inner, Optimizer) and getattr(value, "state", None) is inner.state
        return inside(inner) if is_wrapped else value
    schedule = getattr(value, "__dict__", {}).get("scheduler")
    return schedule if isinstance(schedule, LRScheduler) else value


def _taken(objects: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take those of a class out of *objects*; also those in a list or mapping of nothing else.

    Raises:
        StateError: an item of a list or mapping would have the name of another object.
    """
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
            keys = map(str, value if isinstance(value, Mapping) else range(len(members)))
            named = {f"{name}_{key}": member for key, member in zip(keys, members, strict=True)}
            for twice in named.keys() & {*objects, *taken}:
                raise StateError(
                    f"run.keep was given two objects for one name in snapshots: {twice}, and an item of {name}",
                    "give one of them another name",
                )
            taken |= named
            del objects[name]
    return taken


def is_scaler(value: Any) -> bool:
    """Return True if *value* is torch's gradient scaler or derived from it."""
    return _is_called(value, "GradScaler")


def _is_called(value: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(value).__mro__)


def _only(objects: Mapping[str, Any]) -> Any:
    return next(iter(objects.values())) if len(objects) == 1 else None


def part_of(name: str, value: Any) -> Any:
    """Return *value* as what a snapshot can include: plain values and generators get `state_dict` and `load_state_dict`.

    Raises:
        StateError: a list or a dict holds what a snapshot cannot hold.
    """
    if isinstance(value, random_streams.GENERATORS):
        return Generator(value)
    is_plain = type(value) in _PLAIN or isinstance(value, nn.Parameter)
    return Value(name, value) if is_plain else value


def _restored(live: Any, saved: Any, taken: dict[int, Tensor]) -> Any:
    """Return *saved*, in the lists, dicts and tensors of *live*, those in tuples too, as far as there are any.

    Args:
        taken: Tensors by `id` of those of *live* that they were copied into: one that stands in two places holds one of them.
    """
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        is_alike = (live.shape, live.dtype) == (saved.shape, saved.dtype)
        if not is_alike or taken.setdefault(id(live), saved) is not saved:
            return saved.to(live.device)
        with torch.no_grad():
            return live.copy_(saved)
    if type(live) is list and type(saved) is list:
        same = [_restored(old, new, taken) for old, new in zip(live, saved, strict=False)]
        live[:] = [*same, *saved[len(same) :]]
        return live
    if type(live) is tuple and type(saved) is tuple:
        same = [_restored(old, new, taken) for old, new in zip(live, saved, strict=False)]
        return (*same, *saved[len(same) :])
    if type(live) in (dict, OrderedDict, Counter) and isinstance(saved, dict):
        items = {key: _restored(live.get(key), new, taken) for key, new in saved.items()}
        live.clear()
        live.update(items)
        return live
    return saved
