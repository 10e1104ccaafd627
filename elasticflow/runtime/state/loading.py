"""Live objects take over state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticflow.runtime.torch_private import EXTRA_STATE

if TYPE_CHECKING:
    from elasticflow.runtime.state import codec


def decoded(thing: Any, content: Any, view: codec.Decoder, own: codec.Decoder) -> Any:
    """Return the state of *thing* out of JSON; *view* gives stored tensors, *own* copies of them."""
    if not isinstance(thing, nn.Module):
        return own.decode(content)
    # Loading a module copies into its own tensors; it keeps what `get_extra_state` gave, as others keep all.
    return {
        key: (own if key.rpartition(".")[2] == EXTRA_STATE else view).decode(value)
        for key, value in content.items()
    }


def load(thing: Any, state: Any) -> None:
    """Give *thing* its state; a module's tensors and everything's device stay, dtypes are those of the state."""
    if isinstance(thing, nn.Module):
        # With the versions of its modules, which are no state: without them a module takes the state for an old one's.
        versioned = thing.state_dict()
        versioned.update(state)
        thing.load_state_dict(versioned)
    elif isinstance(thing, Optimizer) and type(thing).load_state_dict is Optimizer.load_state_dict:
        _load_optimizer(thing, state)
    else:
        thing.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load with the dtypes that were saved and on the devices that are used.

    Source: torch 2.13, `Optimizer.load_state_dict` casts to the parameter's dtype (NAdam's `mu_product` is float32
    for bfloat16 parameters, too) and leaves a learning rate that is a tensor on the device it was read to.
    """
    options = [{k: v.device for k, v in g.items() if isinstance(v, Tensor)} for g in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, devices in zip(optimizer.param_groups, options, strict=True):
        for key, device in devices.items():
            if isinstance(group.get(key), Tensor):
                group[key] = group[key].to(device)
    loaded = optimizer.state_dict()["state"]
    for index, saved in state["state"].items():
        for key, value in saved.items() if isinstance(saved, dict) else ():
            if isinstance(value, Tensor) and value.dtype != loaded[index][key].dtype:
                loaded[index][key] = value.to(loaded[index][key].device)
