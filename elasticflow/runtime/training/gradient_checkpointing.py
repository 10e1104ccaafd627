"""Gradient checkpointing: activations are computed again in the backward pass instead of kept.

Torch's `torch.utils.checkpoint` in its non-reentrant form, which works with DistributedDataParallel, frozen weights and
torch.compile. Torch's generators are put back to their state in the forward pass, so that dropout drops the same numbers
again; with the same kernels every bit equals a step without checkpointing.
"""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elasticflow.errors import JobKeyError

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = "train.gradient_checkpointing"
_MOST_NAMED = 5


class Checkpointed(nn.Module):
    """Comes before a module's own class: its forward is checkpointed while it is trained."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns."""
        forward = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # Torch takes arguments of some names, such as `debug`, for its own.
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


def checkpoint_activations(model: nn.Module, globs: Sequence[str] | None = None) -> list[str]:
    """Have the model, or the modules whose names match *globs*, recompute activations; return the names of the modules.

    A module inside a matching module is skipped. Without *globs* the model's own method is used: that of transformers
    (`gradient_checkpointing_enable`), or that of timm (`set_grad_checkpointing`); no names are returned then.

    Raises:
        JobKeyError: the model has no such way, nothing fits, or what would be computed twice keeps count of it.
    """
    if globs is None:
        _enable(model)
        return []
    taken: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in taken)
        if name and not is_inside and any(fnmatchcase(name, glob) for glob in globs):
            _require_repeatable(module, name)
            taken.append(name)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name, _ in model.named_modules() if name):
            message = f'{KEY}: no module of the {type(model).__name__} has a name like "{glob}"'
            raise JobKeyError(KEY, message, _like(model))
    for name in taken:
        module = model.get_submodule(name)
        own = type(module)
        if any(each.__name__ == "GradientCheckpointingLayer" for each in own.__mro__):
            # This layer of transformers also keeps its cache of keys and values from being filled twice.
            function = partial(checkpoint, use_reentrant=False)
            vars(module).update(gradient_checkpointing=True, _gradient_checkpointing_func=function)
            continue
        # A class, not an attribute: copies of the module have it, and what is called by name stays.
        module.__class__ = type(own.__name__, (Checkpointed, own), {"__module__": own.__module__})
    return taken


def _enable(model: nn.Module) -> None:
    kind = type(model).__name__
    enable = getattr(model, "gradient_checkpointing_enable", None)
    of_timm = getattr(model, "set_grad_checkpointing", None)
    if callable(enable):
        options = (
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if _takes_options(enable) else {}
        )
        switch_on = partial(enable, **options)
    elif callable(of_timm):
        switch_on = partial(of_timm, True)
    else:
        message = (
            f"{KEY} = true: the {kind} has no gradient_checkpointing_enable(), as models of transformers have"
        )
        raise JobKeyError(KEY, message, _like(model))
    _require_repeatable(model, "")
    try:
        switch_on()
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise JobKeyError(KEY, f"{KEY} = true: the {kind} refuses: {error}", _like(model)) from error


def _takes_options(enable: Any) -> bool:
    try:
        parameters = inspect.signature(enable).parameters
    except (TypeError, ValueError):
        return False
    return "gradient_checkpointing_kwargs" in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )


def _require_repeatable(module: nn.Module, name: str) -> None:
    """Make sure that a module's forward may run twice for one batch."""
    where = name or type(module).__name__
    for inner_name, inner in module.named_modules(prefix=name):
        if getattr(inner, "track_running_stats", False):
            message = f"{KEY}: {inner_name} is a {type(inner).__name__}, which would count each batch twice"
            raise JobKeyError(
                KEY, message, f"name modules inside {where} that hold none, or use GroupNorm or LayerNorm"
            )
        if _has_spectral_norm(inner):
            message = f"{KEY}: {inner_name} has a spectral norm, whose estimate moves in each forward"
            raise JobKeyError(KEY, message, f"name modules inside {where} that have none")
        if isinstance(inner, torch.jit.ScriptModule) or "forward" in vars(inner):
            message = f"{KEY}: {inner_name or where} has a forward that is not its class's"
            raise JobKeyError(KEY, message, f"name other modules than {where}")


def _has_spectral_norm(module: nn.Module) -> bool:
    """Return whether each forward of *module* makes a step of a power iteration: what is computed again has other weights."""
    buffers = dict(module.named_buffers(recurse=False))
    return any(name.endswith("_u") and f"{name[:-1]}v" in buffers for name in buffers)


def _like(model: nn.Module) -> str:
    """Return the remedy, as text: the lists of blocks that the model has."""
    lists = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    ]
    names = [f'"{name}.*"' for name in lists] or [f'"{name}"' for name, _ in model.named_children()]
    shown = ", ".join(names[:_MOST_NAMED])
    return f"name the modules to be computed again, such as gradient_checkpointing = [{shown}]"
