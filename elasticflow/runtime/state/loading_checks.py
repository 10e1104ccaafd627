"""Whether what a snapshot holds fits the live objects, found out before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from elasticflow.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

Names = list[list[str | None]]
"""Names of the parameters of each group of an optimizer; None for one that is not the model's."""

_OTHER = "go on with the job the snapshot was taken of, or start a new run"


def check_module(module: nn.Module, found: Mapping[str, Any], name: str) -> None:
    """Check names, shapes and dtypes of *found* against the module's.

    Raises:
        StateError: the first difference.
    """
    own = module.state_dict()
    for key in sorted(own.keys() | found.keys()):
        if key not in found:
            raise _misfit(name, f"it has no {key}")
        if key not in own:
            raise _misfit(name, f"the {name} has no {key}")
        mine, its = own[key], found[key]
        if isinstance(mine, Tensor) != isinstance(its, Tensor):
            where = "snapshot" if isinstance(its, Tensor) else "job"
            raise _misfit(name, f"{key} is a tensor only in the {where}")
        if isinstance(mine, Tensor) and not is_lazy(mine):
            _check_tensor(name, key, mine, its)


def check_optimizer(optimizer: Optimizer, found: Any, name: str, *, saved: Names | None, own: Names) -> None:
    """Check that *found* is the state of such an optimizer over such parameters.

    Args:
        optimizer: The live one.
        found: What its `state_dict` gave.
        name: Name of the part.
        saved: Names of the parameters of each group then; None if nobody wrote them down.
        own: The same now.

    Raises:
        StateError: the first difference.
    """
    if not isinstance(found, dict) or "param_groups" not in found:
        return  # of a kind of its own, which checks for itself
    groups, of_snapshot = optimizer.param_groups, found["param_groups"]
    if len(groups) != len(of_snapshot):
        raise _misfit(name, f"{len(of_snapshot)} parameter groups in the snapshot, {len(groups)} in the job")
    for number, (mine, its) in enumerate(zip(groups, of_snapshot, strict=True)):
        if len(mine["params"]) != len(its["params"]):
            sizes = f"{len(its['params'])} parameters in the snapshot, {len(mine['params'])} in the job"
            raise _misfit(name, f"group {number} has {sizes}")
        # An option only in the job is one that a newer optimizer fills in by itself.
        for option in sorted(its.keys() - mine.keys() - {"param_names"}):
            raise _misfit(name, f"{type(optimizer).__name__} has no option `{option}`")
    for number, (then, now) in enumerate(zip(saved or own, own, strict=True)):
        for place, (its_name, my_name) in enumerate(zip(then, now, strict=True)):
            if its_name != my_name:
                names = f"{its_name} in the snapshot, {my_name} in the job"
                raise _misfit(name, f"parameter {place} of group {number} is {names}")


def check_schedule(schedule: Any, found: Any, name: str) -> None:
    """Check that *found* is the state of such a schedule: torch's take over whatever they are given.

    Raises:
        StateError: the first difference.
    """
    if type(schedule).load_state_dict is not LRScheduler.load_state_dict:
        return
    for key in sorted(found.keys() ^ schedule.state_dict().keys()):
        where = "snapshot" if key in found else "job"
        raise _misfit(name, f"{type(schedule).__name__} has `{key}` only in the {where}")


def _check_tensor(name: str, key: str, mine: Tensor, its: Tensor) -> None:
    if mine.shape != its.shape:
        shapes = f"{tuple(its.shape)} in the snapshot, {tuple(mine.shape)} in the job"
        raise _misfit(name, f"{key} has shape {shapes}")
    if mine.dtype != its.dtype:
        raise _misfit(name, f"{key} is {its.dtype} in the snapshot, {mine.dtype} in the job")


def _misfit(name: str, what: str) -> StateError:
    return StateError(f"the snapshot does not fit the job's {name}: {what}", _OTHER)
