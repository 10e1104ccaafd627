"""Live objects take over a saved state, which is compared with them first: nothing is touched if it does not fit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import is_pruned
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import is_sharded
from elasticflow.runtime.process.torch_private import EXTRA_STATE
from elasticflow.snapshots.format.state_json import StateMark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from elasticflow.runtime.state import codec

Names = list[list[str | None]]
"""Names of the parameters of each group of an optimizer; None for one that is not the model's."""

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER = "continue with the job the snapshot was taken of, or start a new run"


def check_module(module: nn.Module, saved: Mapping[str, Any], name: str) -> None:
    """Check names, shapes and dtypes of *saved*, a `state_dict`, against the module's.

    Raises:
        StateError: they differ; names the first difference.
    """
    live = module.state_dict()
    for key in sorted(live.keys() | saved.keys()):
        if key not in saved:
            raise _misfit(name, f"it has no {key}")
        if key not in live:
            raise _misfit(name, f"the {name} has no {key}")
        value, saved_value = live[key], saved[key]
        if isinstance(value, Tensor) != isinstance(saved_value, Tensor):
            where = "snapshot" if isinstance(saved_value, Tensor) else "job"
            raise _misfit(name, f"{key} is a tensor only in the {where}")
        if isinstance(value, Tensor) and not is_lazy(value):
            _check_tensor(name, key, value, saved_value)


def check_optimizer(
    optimizer: Optimizer, saved: Any, name: str, *, saved_names: Names | None, names: Names, made: Any = None
) -> None:
    """Check that *saved* is the state of such an optimizer over such parameters.

    Args:
        saved_names: Names of the parameters of each group then; None if no one wrote them down.
        made: Options of each group when the optimizer was made, before its first step. None: unknown.

    Raises:
        StateError: they differ; names the first difference.
    """
    if not isinstance(saved, dict) or "param_groups" not in saved:
        return  # in a form of the optimizer's own, which checks for itself
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    if len(groups) != len(saved_groups):
        counts = f"{len(saved_groups)} parameter groups in the snapshot, {len(groups)} in the job"
        added = [text for group in (saved_names or [])[len(groups) :] for text in group if text is not None]
        raise _misfit(name, f"{counts}, which has none for {added[0]}" if added else counts)
    for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            sizes = (
                f"{len(saved_group['params'])} parameters in the snapshot, {len(group['params'])} in the job"
            )
            raise _misfit(name, f"group {number} has {sizes}")
        # An option only in the job is one that a newer optimizer fills in by itself.
        # An option that the optimizer had not when it was made is its own record, as `scheduled_lr` of a schedule-free one.
        options = saved_group.keys() if made is None else saved_group.keys() & made[number].keys()
        for option in sorted(options - group.keys() - {"param_names"}):
            raise _misfit(name, f"{type(optimizer).__name__} has no option `{option}`")
    for number, (then, now) in enumerate(zip(saved_names or names, names, strict=True)):
        for index, (saved_name, live_name) in enumerate(zip(then, now, strict=True)):
            if saved_name != live_name:
                both = f"{saved_name} in the snapshot, {live_name} in the job"
                raise _misfit(name, f"parameter {index} of group {number} is {both}")


def check_schedule(schedule: Any, saved: Any, name: str) -> None:
    """Check that *saved* is the state of such a schedule: torch's schedules load whatever they are given.

    Raises:
        StateError: they differ; names the first difference.
    """
    if type(schedule).load_state_dict is not LRScheduler.load_state_dict:
        return
    for key in sorted(saved.keys() ^ schedule.state_dict().keys()):
        where = "snapshot" if key in saved else "job"
        raise _misfit(name, f"{type(schedule).__name__} has `{key}` only in the {where}")


def decoded(stateful: Any, content: Any, view: codec.Decoder, own: codec.Decoder) -> Any:
    """Return the state of *stateful* out of JSON; *view* gives stored tensors, *own* copies of them."""
    if isinstance(stateful, Optimizer):
        return _decoded_optimizer(stateful, content, own)
    if not isinstance(stateful, nn.Module):
        return own.decode_over(content, lambda: _state_now(stateful))
    # Loading a module copies into its own tensors; what `get_extra_state` gave it keeps, as other objects keep all.
    live = stateful.state_dict()
    return {
        key: own.decode_over(value, partial(live.get, key))
        if key.rpartition(".")[2] == EXTRA_STATE
        else view.decode(value, live.get(key))
        for key, value in content.items()
    }


def _decoded_optimizer(optimizer: Optimizer, content: Any, own: codec.Decoder) -> Any:
    """Return the optimizer's state; tensors of a sharded parameter are shared out as the parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = content["state"].get(StateMark.DICT) if isinstance(content, dict) and "state" in content else None
    if pairs is None or not any(map(is_sharded, parameters)):
        return own.decode(content)
    of_parameters = dict(enumerate(parameters))
    state = {own.decode(key): own.decode(value, of_parameters.get(key)) for key, value in pairs}
    return {key: state if key == "state" else own.decode(value) for key, value in content.items()}


def _state_now(stateful: Any) -> Any:
    try:
        return stateful.state_dict()
    except Exception:  # noqa: BLE001  # the job's own object, which may have no state before it has loaded one
        return None


def load(stateful: Any, state: Any) -> None:
    """Give *stateful* its state; a module's tensors and all devices stay, dtypes are those of the state."""
    if isinstance(stateful, nn.Module):
        # With the versions of its modules, which are no state: without them a module takes the state for an older one's.
        versioned = stateful.state_dict()
        versioned.update(state)
        stateful.load_state_dict(versioned)
        prune_again(stateful)
    elif isinstance(stateful, Optimizer) and type(stateful).load_state_dict is Optimizer.load_state_dict:
        _load_optimizer(stateful, state)
    elif isinstance(stateful, GradScaler):
        # Numbers, also where the snapshot holds the tensors of a device.
        stateful.load_state_dict({k: v.item() if isinstance(v, Tensor) else v for k, v in state.items()})
    else:
        stateful.load_state_dict(state)


def prune_again(model: nn.Module) -> None:
    """Compute the pruned weights of *model* from its parameters and masks, as torch does in each forward alone."""
    for module in model.modules() if is_pruned(model) else ():
        for key, mask in module.named_buffers(recurse=False):
            name = key.removesuffix("_mask")
            original = getattr(module, f"{name}_orig", None)
            if name != key and isinstance(original, nn.Parameter):
                setattr(module, name, mask.to(dtype=original.dtype) * original)


def in_place(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Return a function to call after loading: each optimizer's groups and state are then the objects that they are now.

    `Optimizer.load_state_dict` makes new ones, of which neither the optimizer inside SAM nor a schedule that holds a group learns.
    """
    plain = [each for each in optimizers if {"param_groups", "state"} <= vars(each).keys()]
    before = [(each, each.param_groups, list(each.param_groups), each.state) for each in plain]

    def put_back() -> None:
        loaded = [([dict(group) for group in each.param_groups], dict(each.state)) for each, *_ in before]
        for (optimizer, groups, dicts, state), (new_groups, new_state) in zip(before, loaded, strict=True):
            for old, new in zip(dicts, new_groups, strict=True):
                old.clear()
                old.update(new)
            state.clear()
            state.update(new_state)
            optimizer.param_groups, optimizer.state = groups, state

    return put_back


def load_weights(model: nn.Module, path: str) -> None:
    """Copy the tensors of a safetensors file, or of a folder that transformers has saved, into the model. Every rank.

    Raises:
        StateError: a file cannot be read, or their names, shapes or dtypes are not the model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    try:
        for file in weight_files(path):
            weights |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise StateError(f"model.weights: {path} cannot be read: {error}") from error
    add_tied(model, weights)
    check_module(model, weights, "model")
    model.load_state_dict(weights)


def weight_files(path: str) -> list[str]:
    """Return the safetensors files of *path*: that file; or those of a folder or an index, as `save_pretrained` writes them.

    Raises:
        StateError: the folder holds none, or its index is invalid.
        OSError: it cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        if (place / _WHOLE).is_file():
            return [str(place / _WHOLE)]
        if not (place / _INDEX).is_file():
            remedy = "save_pretrained writes such a folder; an adapter's or a .bin file's weights are loaded by your own model.entry"
            raise StateError(f"model.weights: {path} holds neither {_WHOLE} nor {_INDEX}", remedy)
        place = place / _INDEX
    if place.name.endswith(".index.json"):
        try:
            names = set(json.loads(place.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StateError(f"model.weights: {place} is no index of safetensors files: {error!r}") from error
        return [str(place.parent / name) for name in sorted(names)]
    return [str(place)]


def add_tied(model: nn.Module, weights: dict[str, Any]) -> None:
    """Add to *weights* the names of tied parameters and buffers of which another name is there: files hold them once."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        there = next((name for name in tied if name in weights), None)
        if there is not None:
            weights.update({name: weights[there] for name in tied if name not in weights})


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load with the dtypes that were saved and on the devices that are used.

    Source: torch 2.13, `Optimizer.load_state_dict` casts to the parameter's dtype (NAdam's `mu_product` is float32
    for bfloat16 parameters, too), also in lists, replaces text by that of a generator and an OrderedDict by a dict, leaves
    a learning rate that is a tensor on the device it was read to, and drops an option that the state lacks, such as a
    function.
    """
    options = [{k: v.device for k, v in g.items() if isinstance(v, Tensor)} for g in optimizer.param_groups]
    functions = [{k: v for k, v in g.items() if isinstance(v, FunctionType)} for g in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, devices, own in zip(optimizer.param_groups, options, functions, strict=True):
        group.update(own)
        for key, device in devices.items():
            if isinstance(group.get(key), Tensor):
                group[key] = group[key].to(device)
    loaded = optimizer.state_dict()["state"]
    for index, saved in state["state"].items():
        for key, value in saved.items() if isinstance(saved, dict) else ():
            loaded[index][key] = _uncast(value, loaded[index][key])


def _uncast(saved: Any, loaded: Any) -> Any:
    """Return *saved* with its tensors on the devices of those in *loaded*, which are returned where they have its dtype."""
    if isinstance(saved, Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        saved.update({key: _uncast(value, loaded[key]) for key, value in saved.items()})
        return saved
    if type(saved) in (list, tuple):
        return type(saved)(_uncast(*pair) for pair in zip(saved, loaded, strict=True))
    return saved


def _check_tensor(name: str, key: str, live: Tensor, saved: Tensor) -> None:
    if live.shape != saved.shape:
        shapes = f"{tuple(saved.shape)} in the snapshot, {tuple(live.shape)} in the job"
        raise _misfit(name, f"{key} has shape {shapes}")
    if live.dtype != saved.dtype:
        raise _misfit(name, f"{key} is {saved.dtype} in the snapshot, {live.dtype} in the job")


def _misfit(name: str, what: str) -> StateError:
    return StateError(f"the snapshot does not fit the job's {name}: {what}", _OTHER)
