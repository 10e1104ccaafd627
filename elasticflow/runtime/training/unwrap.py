"""The job's own model out of what wraps it, so that a method of its class can be called."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from elasticflow.errors import StateError
from elasticflow.runtime.process.torch_private import COMPILED_MODEL

_Model = TypeVar("_Model", bound=nn.Module)
# Attributes of torch.compile(model), and of DistributedDataParallel, AveragedModel and the like.
_INSIDE = COMPILED_MODEL, "module"


def unwrap_model(model: nn.Module, kind: type[_Model]) -> _Model:
    """Return the *kind* that *model* is or wraps.

    Raises:
        StateError: the value is no such wrapper.
    """
    inner = model
    while not isinstance(inner, kind):
        inside = (getattr(inner, name, None) for name in _INSIDE)
        wrapped = next((each for each in inside if isinstance(each, nn.Module)), None)
        if wrapped is None:
            raise StateError(
                f"the job file names a method of {kind.__name__}, but the model is a {type(model).__name__}",
                "name a method of the model's own class, or a function that takes the model",
            )
        inner = wrapped
    return inner
